"""From overrides to a configuration, or to a list of the problems with them."""

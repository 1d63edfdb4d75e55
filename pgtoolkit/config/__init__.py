"""From overrides to a configuration, or to a list of what is wrong with them."""

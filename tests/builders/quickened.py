"""What the tests do only once in a process: work of libraries that has the same result each time.

tests/conftest.py calls these functions, and so does the server that forks processes for tests,
where they do nothing if it is a fork of that process itself.
"""

import contextlib
import copy
import functools
import gc
import importlib
import inspect
import logging
import math
import os
import sqlite3
import sys
import types
from abc import ABCMeta
from collections import defaultdict
from pathlib import Path

import tqdm

from pgtoolkit.runs import provenance
from pgtoolkit.system.plain_files import replacing
from pgtoolkit.tracking import curves, store


@functools.cache
def quicken_processes():
    """Start no thread of tqdm's, since a process with another thread is not forked, do not wait
    for the disk, since no test survives a power failure, and search rarely for garbage in cycles,
    which is an eighth of a run's time: the tests leave little of it."""
    gc.set_threshold(50_000, 20, 50)
    tqdm.tqdm.monitor_interval = 0
    os.fsync = lambda descriptor: None


@functools.cache
def quicken_logs():
    """Take a test's records from the root logger alone, and not also, three times in a test, from
    each of the dozens of loggers of libraries that pass nothing on."""
    from _pytest.logging import catching_logs

    def begin(self):
        root = logging.getLogger()
        root.addHandler(self.handler)
        self.attached_loggers.append(root)
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(self.orig_level, self.level))
        return self.handler

    catching_logs.__enter__ = begin


@functools.cache
def quicken_interpreter():
    """Look up only once which functions of Triton's language its interpreter replaces, replace them
    once in a launch for the functions of each module, and not at each call of a function, make the
    table of NumPy's types once, check the sizes of a block once, make the shape of a tensor once,
    take two tensors of one type and shape as they are, look for overflows of integers only where
    one would be said, and find the type of a tuple where it is asked for.

    Without this it takes at least twice as long.
    """
    from triton.language import core
    from triton.language.core import is_builtin
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    @functools.cache
    def names_in(package):
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package, builder, *scope):
        for name in names_in(package):
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, *scope)

    interpreter._patch_builtin = patch_builtin

    patch_all = interpreter._patch_lang
    patched = []  # the names of modules whose functions a kernel calls, while it runs

    def patch_lang(function):
        is_launch = not patched
        if any(names is function.__globals__ for names in patched):
            return types.SimpleNamespace(restore=lambda: None)
        scope = patch_all(function)
        patched.append(function.__globals__)
        if is_launch and scope is not None:  # older versions restore nothing
            restore = scope.restore

            def restore_all():
                patched.clear()
                restore()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_lang

    find_type = interpreter._get_np_dtype
    of_pointer = find_type(core.pointer_type(core.float32))
    of_scalar = functools.cache(find_type)

    def numpy_type(kind):
        scalar = kind.element_ty if isinstance(kind, core.block_type) else kind
        return of_pointer if isinstance(scalar, core.pointer_type) else of_scalar(scalar)

    interpreter._get_np_dtype = numpy_type

    make_block = core.block_type.__init__
    blocks = {}

    def begin_block(self, element_ty, shape):
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        key = (element_ty.name, *sizes)
        if key in blocks:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = blocks[key]
        else:
            make_block(self, element_ty, shape)
            blocks[key] = (self.shape, self.numel, self.name)

    core.block_type.__init__ = begin_block

    @functools.cache
    def shape_and_size(sizes):
        return core.tuple([*map(core.constexpr, sizes)]), core.constexpr(math.prod(sizes))

    def begin_tensor(self, handle, type):
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = shape_and_size((*type.shape,) if type.is_block() else ())

    core.tensor.__init__ = begin_tensor

    check_types = TritonSemantic.binary_op_type_checking_impl
    as_they_are = {core.float32, core.float64, core.int1, core.int32, core.int64}

    def check_types_of_two(self, lhs, rhs, *flags, **named_flags):
        are_tensors = type(lhs) is type(rhs) is core.tensor
        if are_tensors and lhs.shape is rhs.shape and lhs.dtype == rhs.dtype in as_they_are:
            return lhs, rhs
        return check_types(self, lhs, rhs, *flags, **named_flags)

    TritonSemantic.binary_op_type_checking_impl = check_types_of_two

    check_overflow = TritonSemantic.binary_op_sanitize_overflow_impl

    def check_overflow_if_said(self, lhs, rhs, binary_op):
        if self.builder.options.debug:  # else what was found is dropped
            check_overflow(self, lhs, rhs, binary_op)

    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow_if_said

    make_tuple = core.tuple.__init__

    def begin_tuple(self, values, type=None):
        if type is None:
            self.values = [*values]
        else:
            make_tuple(self, values, type)

    def type_of_tuple(self):
        if "known_type" not in vars(self):
            self.known_type = core._type_for_tuple_values(self.values)
        return self.known_type

    core.tuple.__init__ = begin_tuple
    core.tuple.type = property(type_of_tuple, lambda self, type: setattr(self, "known_type", type))


@functools.cache
def quicken_git():
    """Ask git only once about the repository of these tests, which they do not change.

    The start of each run asks, and starts a process for each of six answers.
    """
    ask = provenance._git
    ask_once = functools.cache(ask)

    def answer(directory, *arguments):
        is_of_tests = Path(directory).is_relative_to(Path(__file__).parents[2])
        return (ask_once if is_of_tests else ask)(directory, *arguments)

    provenance._git = answer


@functools.cache
def quicken_hydra():
    """Parse the files of conf/ and of Hydra once, not at every composition, which is half of its
    time, and make our schemas once.

    Interpolations are parsed once, too, and what a package has is looked up once. The map for
    interpolations is made only where a default has an interpolation. Nodes, and what is known of
    them, are copied by their fields, and only where they are put into a composition. Whether an
    object is one is asked without classes that are registered, of which there are none, and
    parents are set only where they change. What asks of each value whether it is missing or an
    interpolation does no import, and versions of Hydra are parsed once.
    """
    from hydra import version
    from hydra._internal import defaults_list
    from hydra._internal.config_repository import ConfigRepository, ObjectType
    from hydra._internal.core_plugins import importlib_resources_config_source as of_packages
    from hydra.plugins.config_source import ConfigResult
    from omegaconf import DictConfig, ListConfig, OmegaConf, ValueNode, _utils, base, grammar_parser
    from omegaconf.base import Box, Container, Metadata, Node, UnionNode

    load = ConfigRepository.load_config
    make_map = defaults_list._create_interpolation_map
    parsed = {}
    shipped = f"{Path(__file__).parents[2]}/conf"

    def copied_metadata(metadata, memo):
        result = object.__new__(type(metadata))
        vars(result).update(vars(metadata), flags=dict(metadata.flags))
        if metadata.resolver_cache:
            result.resolver_cache = copy.deepcopy(metadata.resolver_cache, memo)
        else:
            result.resolver_cache = defaultdict(dict)
        return result

    def copied_node(node, memo):
        result = object.__new__(type(node))
        known = copied_metadata(node._metadata, memo)
        vars(result).update(vars(node), _metadata=known, _flags_cache=None)
        return result

    def copied_container(node, memo):
        result = copied_node(node, memo)
        content = vars(node)["_content"]
        if isinstance(content, dict):
            content = {name: child.__deepcopy__(memo) for name, child in content.items()}
        elif isinstance(content, list):
            content = [child.__deepcopy__(memo) for child in content]
        vars(result)["_content"] = content
        for child in children_of(result):
            vars(child)["_parent"] = result
        return result

    class KnowsOwnClasses(ABCMeta):
        """Looks for no class that is registered as a subclass."""

        __instancecheck__ = type.__instancecheck__

    def subclasses_of(kind):
        return {kind, *(each for child in kind.__subclasses__() for each in subclasses_of(child))}

    def set_parents(node):
        for child in children_of(node):
            if vars(child)["_parent"] is not node:
                child._set_parent(node)
            if isinstance(child, Box):
                child._re_parent()

    def children_of(node):
        content = vars(node)["_content"]
        if isinstance(content, dict):
            return content.values()
        return content if isinstance(content, list) else ()  # None, or an interpolation

    def load_config(repository, config_path):
        source = repository._find_object_source(config_path, ObjectType.CONFIG)
        place = None if source is None else source.path
        is_schema = place == "" and "schema" in config_path
        # What experiments set is compared with the chosen options as they are read.
        is_shipped = place == shipped and not config_path.startswith(("experiment/", "debug/"))
        if not (is_schema or is_shipped or place == "hydra.conf"):
            return load(repository, config_path)
        if config_path not in parsed:
            parsed[config_path] = load(repository, config_path)
        return CopiedWhenRead(parsed[config_path])

    class CopiedWhenRead(ConfigResult):
        """A file of which each composition has a copy, made where it is put into one. Lists of
        defaults are expanded without one."""

        def __init__(self, read):
            vars(self).update(vars(read), read=vars(read)["config"])
            del vars(self)["config"]

        def __getattr__(self, name):
            if name != "config":
                raise AttributeError(name)
            self.config = copy.deepcopy(self.read)
            return self.config

    def interpolation_map(overrides, defaults, self_added):
        if any(default.is_interpolation() for default in defaults):
            return make_map(overrides, defaults, self_added)
        return None

    def looked_up_once(look_up):
        found = functools.cache(lambda place, name: look_up(sources[place], name))
        sources = {}

        def answer(source, config_path):
            sources[source.path] = source
            return found(source.path, config_path)

        return answer

    def is_missing_value(value):
        value = value._value() if isinstance(value, Node) else value
        return isinstance(value, str) and value == "???"

    def is_interpolation(value, strict_interpolation_validation=False):
        value = value._value() if isinstance(value, Node) else value
        if not isinstance(value, str) or "${" not in value:
            return False
        return _utils._is_interpolation_string(value, strict_interpolation_validation)

    def get_value(value):
        if isinstance(value, ValueNode):
            return value._value()
        if not isinstance(value, Container | UnionNode):
            return value
        content = value._value()
        if content is None or is_missing_value(content) or is_interpolation(content):
            return content
        return get_value(content) if isinstance(value, UnionNode) else value

    def replace_everywhere(function):
        """Replace the function of OmegaConf's that has this name, in all modules that have it."""
        name = f"_{function.__name__}"
        original = getattr(_utils, name)
        for path, module in list(sys.modules.items()):
            if path.startswith("omegaconf") and vars(module).get(name) is original:
                setattr(module, name, function)

    for function in (is_missing_value, is_interpolation, get_value):
        replace_everywhere(function)
    OmegaConf.is_config = staticmethod(lambda value: isinstance(value, Container))
    version._get_version = functools.cache(version._get_version)

    packages = of_packages.ImportlibResourcesConfigSource
    packages.is_config = looked_up_once(packages.is_config)
    packages.is_group = looked_up_once(packages.is_group)
    _utils.is_attr_class = lambda value: False  # we have none of attrs
    Metadata.__deepcopy__ = copied_metadata
    for kind in ValueNode.__subclasses__():
        kind.__deepcopy__ = copied_node
    for kind in subclasses_of(Node):
        kind.__class__ = KnowsOwnClasses
    for kind in (DictConfig, ListConfig):
        kind.__deepcopy__ = copied_container
        kind._re_parent = set_parents
    base.parse = functools.cache(grammar_parser.parse)  # nothing changes a tree
    ConfigRepository.load_config = load_config
    defaults_list._create_interpolation_map = interpolation_map


@functools.cache
def quicken_models():
    """Read the attributes of a model's configuration without asking each time whether its layers
    differ in them, which a forward pass does dozens of times. Nothing without transformers."""
    configuration = sys.modules.get("transformers.configuration_utils")
    if configuration is None:
        return
    kind = configuration.PreTrainedConfig
    ask = kind.__getattribute__

    def attribute(self, name):
        own = object.__getattribute__(self, "__dict__")
        if "_heterogeneity_spec" in own:
            return ask(self, name)
        renamed = object.__getattribute__(self, "attribute_map")
        return object.__getattribute__(self, renamed.get(name, name))

    kind.__getattribute__ = attribute


@functools.cache
def quicken_compositions():
    """Put a composition of our options together from few of Hydra's, that have the first, the
    second, ... option of each group.

    An option sets keys of its group alone: tests/config/test_config.py sees that Hydra composes the
    same, key by key.
    """
    from pgtoolkit.config import files, hydra_files

    compose = hydra_files._compose_declared.__wrapped__
    names = {
        group: names for group, names in files.options().items() if group not in files.OPTIONAL
    }

    @functools.cache
    def compose_together(choices):
        chosen = [tuple(choice.split("=", 1)) for choice in choices]
        are_ours = all(option in names.get(group, ()) for group, option in chosen)
        if not chosen or not are_ours or len(dict(chosen)) < len(chosen):
            return compose(choices)
        config = copy.deepcopy(compose_together(()))
        for group, option in chosen:
            values = copy.deepcopy(options_at(names[group].index(option))._get_node(group))
            values._set_parent(config)
            vars(config)["_content"][group] = values
            config.hydra.runtime.choices[group] = option
        config.hydra.overrides.task = [*choices]
        config.hydra.job.override_dirname = ",".join(sorted(choices))
        return config

    @functools.cache
    def options_at(place):
        choices = [f"{group}={some[place]}" for group, some in names.items() if place < len(some)]
        return compose(tuple(choices))

    hydra_files._compose_declared = compose_together


@functools.cache
def quicken_stores():
    """Have MLflow make its tables only once in a process, and copy them into each further store of
    SQLite: it makes old ones and changes them in dozens of steps, which takes half a second."""
    importing = store.importing_mlflow
    tables = []

    def make_tables(engine, make, is_empty):
        if engine.dialect.name != "sqlite" or not is_empty(engine):
            make(engine)
            return
        if not tables:
            make(engine)
        with contextlib.closing(engine.raw_connection()) as connection:
            if not tables:
                tables.append(connection.driver_connection.serialize())
                return
            with contextlib.closing(sqlite3.connect(":memory:")) as made:
                made.deserialize(tables[0])
                made.backup(connection.driver_connection)

    @functools.cache
    def replace_in(utils):
        utils._initialize_tables = functools.partial(
            make_tables, make=utils._initialize_tables, is_empty=utils._is_empty_database
        )

    @contextlib.contextmanager
    def importing_mlflow():
        with importing():
            replace_in(importlib.import_module("mlflow.store.db.utils"))
            yield

    store.importing_mlflow = importing_mlflow


class Pictures:
    """Draws the curves of the first run in a process; later runs get a copy of that picture.

    Drawing them takes as long as the steps of a short run. Tests of the picture itself draw it all.
    """

    def __init__(self):
        self.first = None

    def plot_curves(self, recorded, path_png, title):
        if self.first is None:
            curves.plot_curves(recorded, path_png, title)
            self.first = path_png.read_bytes()
        else:
            with replacing(path_png) as file:
                file.write(self.first)


PICTURES = Pictures()

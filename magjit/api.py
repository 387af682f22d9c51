"""The public API: `compile` and what goes with it."""

from __future__ import annotations

import abc
import copy
import functools
import types
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, overload

import torch

from magjit import _C, dispatch
from magjit.dispatch import Controller, MagJITWarning, Options
from magjit.errors import ArgumentError
from magjit.own_frames import depth_of_the_call
from magjit.plugin import Backend, resolve
from magjit.records import Stats

F = TypeVar("F", bound=Callable[..., Any])
_CONTROLLER = "_magjit_controller"
_DISPATCHER = "_magjit_dispatcher"


@overload
def compile(
    model: F,
    *,
    backend: str | Backend | Callable[..., Any] = ...,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    mode: str | None = ...,
    options: Mapping[str, Any] | None = ...,
    disable: bool = ...,
) -> F: ...


@overload
def compile(
    model: None = None,
    *,
    backend: str | Backend | Callable[..., Any] = ...,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    mode: str | None = ...,
    options: Mapping[str, Any] | None = ...,
    disable: bool = ...,
) -> Callable[[F], F]: ...


def compile(
    model: Any = None,
    *,
    backend: str | Backend | Callable[..., Any] = "inductor",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    disable: bool = False,
) -> Any:
    """Compile a module, a function or a method; also usable as a decorator.

    The first call runs the program as it is, once, under observation; later calls for which the
    record's guard holds run the compiled graph and redo the side effects (MagPy §2.2).

    Args:
        model: an ``nn.Module``, a Python function, a bound method or any callable object.
        backend: a name (see `list_backends`), a `magjit.plugin.Backend`, or a callable
            ``(graph_module, example_inputs) -> callable`` as ``torch.compile`` takes it.
        fullgraph: raise `GraphBreakError` when the program cannot become one graph, after the
            run has finished; otherwise it runs eagerly, with one warning.
        dynamic: None makes symbols of sizes, and inputs of numbers, once they were seen to change
            from call to call; True from the first call on; False never. The backend is told, too.
        mode, options: as ``torch.compile`` takes them.
        disable: return ``model`` as it is.

    Returns:
        An object that is the module for ``isinstance``, ``state_dict``, attributes, ``train()``
        and so on, or a callable for anything else.

    Raises:
        ArgumentError: an argument has the wrong type.
        UnknownBackendError: no backend has this name.
    """
    _check_settings(fullgraph, dynamic, disable)
    found = resolve(backend, mode=mode, options=options, dynamic=dynamic)
    if model is None:
        return functools.partial(
            compile,
            backend=backend,
            fullgraph=fullgraph,
            dynamic=dynamic,
            mode=mode,
            options=options,
            disable=disable,
        )
    _check_model(model)
    if disable:
        return model
    return _compile(model, Options(found, fullgraph, dynamic, mode, options))


def _check_model(model: Any) -> None:
    if not callable(model):
        raise ArgumentError(
            f"magjit.compile takes a module or a callable, not {type(model).__qualname__}",
            remedy="call it as magjit.compile(model, backend=...)",
        )
    if isinstance(model, type):
        raise ArgumentError(
            f"magjit.compile takes an object, not the class {model.__qualname__}",
            remedy="compile an instance, or decorate its forward method",
        )


def _check_settings(fullgraph: Any, dynamic: Any, disable: Any) -> None:
    for name, value in (("fullgraph", fullgraph), ("disable", disable)):
        if not isinstance(value, bool):
            raise ArgumentError(f"{name} must be a bool, got {value!r}")
    if dynamic is not None and not isinstance(dynamic, bool):
        raise ArgumentError(f"dynamic must be a bool or None, got {dynamic!r}")


def _compile(model: Any, options: Options) -> Any:
    inner = controller_of(model)
    if inner is not None:
        model = inner.target
    if isinstance(model, torch.jit.ScriptModule):
        return _scripted(model, options)
    controller = Controller(model, options)
    if isinstance(model, torch.nn.Module):
        return _module_shell(model, controller)
    return _function_shell(model, controller)


def _scripted(model: torch.jit.ScriptModule, options: Options) -> torch.jit.ScriptModule:
    """TorchScript has compiled it already, and its code cannot be watched."""
    reason = "magjit.compile cannot watch a ScriptModule"
    remedy = "compile the Python module that it was made of"
    if options.fullgraph:
        raise ArgumentError(reason, remedy=remedy)
    text = f"{reason}, which runs as it is\n  way out: {remedy}"
    warnings.warn(text, MagJITWarning, stacklevel=depth_of_the_call())
    return model


# -- compiled modules ---------------------------------------------------------------------------


def _module_shell(module: torch.nn.Module, controller: Controller) -> torch.nn.Module:
    """An object of a subclass of the module's own class that shares its ``__dict__``.

    It is only a shell: capture and replay run the original module, which is the ``self`` that
    hooks and methods see.
    """
    base: Any = type(module)
    dispatcher = controller.dispatcher

    def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
        return base(*args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # torch._dynamo follows this function
            return base.__call__(self, *args, **kwargs)
        return dispatcher(*args, **kwargs)

    namespace = {
        **_slots(base),
        "__call__": call,
        _DISPATCHER: dispatcher,
        "__new__": construct,
        "__deepcopy__": _deepcopy_shell,
        "__copy__": _copy_shell,
        "__reduce_ex__": _reduce_shell,
        "_replicate_for_data_parallel": _replicate_shell,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        _CONTROLLER: controller,
    }
    cls = _subclass(base, namespace)
    _C.route_calls(cls)
    shell: torch.nn.Module = object.__new__(cls)
    object.__setattr__(shell, "__dict__", module.__dict__)
    controller.shell = weakref.ref(shell)
    return shell


class _Blank:
    """A class of modules' layout, to be replaced as a base."""


def _subclass(base: type, namespace: dict[str, Any]) -> type:
    """A subclass that neither a metaclass nor an ``__init_subclass__`` of the user's hears of."""
    metaclass = type(base)
    silent = not any("__init_subclass__" in vars(cls) for cls in base.__mro__[:-1])
    if metaclass in (type, abc.ABCMeta) and silent:
        return metaclass(base.__name__, (base,), namespace)
    cls: Any = type.__new__(metaclass, base.__name__, (_Blank,), namespace)
    try:
        cls.__bases__ = (base,)
    except TypeError:  # __slots__ give it another layout
        return metaclass(base.__name__, (base,), namespace)
    return cast(type, cls)


def _slots(base: type) -> dict[str, property]:
    """Members in ``__slots__`` are no part of the shared ``__dict__``: the shell passes them on."""
    return {
        name: _forwarded(member)
        for cls in reversed(base.__mro__)
        for name, member in vars(cls).items()
        if isinstance(member, types.MemberDescriptorType)
    }


def _forwarded(member: types.MemberDescriptorType) -> property:
    return property(
        lambda shell: member.__get__(_controller(shell).target),
        lambda shell, value: member.__set__(_controller(shell).target, value),
        lambda shell: member.__delete__(_controller(shell).target),
    )


def _deepcopy_shell(self: Any, memo: dict[int, Any]) -> Any:
    controller = _controller(self)
    return _compile(copy.deepcopy(controller.target, memo), controller.options)


def _copy_shell(self: Any) -> Any:
    controller = _controller(self)
    return _compile(copy.copy(controller.target), controller.options)


def _reduce_shell(self: Any, protocol: Any) -> Any:
    controller = _controller(self)
    return _restore, (controller.target, controller.options)


def _restore(target: Any, options: Options) -> Any:
    """Unpickle: compile again what was compiled."""
    return _compile(target, options)


def _replicate_shell(self: Any) -> Any:
    """A replica for ``DataParallel`` has other parameters: it runs as the plain module."""
    return _controller(self).target._replicate_for_data_parallel()


# -- compiled functions -------------------------------------------------------------------------


class CompiledFunction:
    """A compiled function or callable; each has a subclass of its own with its dispatcher."""

    __call__: Callable[..., Any]

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        return self if obj is None else types.MethodType(self, obj)

    def __repr__(self) -> str:
        return f"<magjit.compile of {_controller(self).name}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return getattr(_controller(self).target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_controller(self).target, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_controller(self).target, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        controller = _controller(self)
        return _compile(copy.deepcopy(controller.target, memo), controller.options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        controller = _controller(self)
        return _restore, (controller.target, controller.options)


def _function_shell(function: Any, controller: Controller) -> CompiledFunction:
    dispatcher = controller.dispatcher

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # torch._dynamo follows this function
            return function(*args, **kwargs)
        return dispatcher(*args, **kwargs)

    cls = type(
        "CompiledFunction",
        (CompiledFunction,),
        {"__call__": call, _DISPATCHER: dispatcher, _CONTROLLER: controller},
    )
    _C.route_calls(cls)
    shell: Any = object.__new__(cls)
    for name in (*functools.WRAPPER_ASSIGNMENTS, "__type_params__"):
        if hasattr(function, name):
            object.__setattr__(shell, name, getattr(function, name))
    object.__setattr__(shell, "__wrapped__", function)
    return cast(CompiledFunction, shell)


# -- around compiled objects --------------------------------------------------------------------


def controller_of(compiled: Any) -> Controller | None:
    """The controller of a compiled object, or None."""
    found = getattr(type(compiled), _CONTROLLER, None)
    return found if isinstance(found, Controller) else None


def _controller(compiled: Any) -> Controller:
    found = controller_of(compiled)
    if found is None:
        raise ArgumentError(
            f"{type(compiled).__qualname__} is not compiled", remedy="pass what magjit.compile gave"
        )
    return found


def stats(compiled: Any = None) -> Stats:
    """Counters of a compiled object, or of all of them together."""
    return dispatch.all_stats() if compiled is None else _controller(compiled).stats


def reset(compiled: Any = None) -> None:
    """Forget the records of a compiled object, or of all; the next call captures anew."""
    if compiled is None:
        dispatch.reset_all()
    else:
        _controller(compiled).reset()

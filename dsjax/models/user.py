"""The user's own model: a function of an importable module, called with the config's fields."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from flax import nnx

from dsjax.config.messages import nearest
from dsjax.errors import ConfigError, DsjaxError
from dsjax.models.spec import ModelSpec, Stages

Result = TypeVar("Result")


def users_model(kind: str, fields: Mapping[str, Any], remat: str = "none") -> ModelSpec:
    """The model of `module:function`, looked for in the current directory and on the import path.

    The function takes the fields as keywords. One that also takes `rngs` makes the module itself (so does
    an nnx.Module class); any other returns ``init(rngs) -> module``, or an object or mapping with `init`
    and, if it likes, `loss` or `stages` (a `dsjax.Stages`), and `param_axes`.

    Raises:
      ConfigError: no such module or function, other fields than it takes, or its own error, with the
        place in the user's code.
    """
    function = _function(kind)
    parameters = _parameters(function)
    _check_fields(kind, parameters, fields)
    if "rngs" in parameters:
        parts: dict[str, Any] = {"init": lambda rngs: function(**fields, rngs=rngs)}
    else:
        parts = _parts(kind, _guarded(kind, lambda: function(**fields)))

    def init(rngs: nnx.Rngs) -> nnx.Module:
        module = _guarded(kind, lambda: parts["init"](rngs))
        if not isinstance(module, nnx.Module):
            raise ConfigError(
                f"model.kind: {kind} made a {type(module).__name__}, not a flax.nnx.Module (wrap a Linen "
                "module in flax.nnx.bridge.ToNNX)"
            )
        return module

    loss, stages = parts.get("loss"), parts.get("stages")
    abstract = None if loss is not None or stages is not None else nnx.eval_shape(lambda: init(nnx.Rngs(0)))
    return ModelSpec(
        init=init,
        loss=loss,
        param_axes=parts.get("param_axes") or {},
        stages=stages and replace(stages, remat=remat),
        remat_by_layer=stages is not None,
        vocab_size=getattr(abstract, "vocab_size", None),
        has_hidden=all(hasattr(abstract, name) for name in ("hidden", "unembedding", "vocab_size")),
    )


def _function(kind: str) -> Callable[..., Any]:
    module_name, _, name = kind.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(_failure(kind, error)) from error
        raise ConfigError(
            f"model.kind: no module {error.name} in {os.getcwd()} or on the import path; install it, set "
            "PYTHONPATH, or run where it lies"
        ) from None
    except Exception as error:
        raise ConfigError(_failure(kind, error)) from error
    function = getattr(module, name, None)
    if not callable(function):
        near = nearest(name, [n for n in vars(module) if callable(getattr(module, n))])
        hint = f"; did you mean {module_name}:{near}?" if near else ""
        what = "no function" if function is None else f"{type(function).__name__}, not a function,"
        raise ConfigError(f"model.kind: {what} {name} in {module.__file__}{hint}")
    return function


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        if inspect.isclass(function):  # Flax's metaclass hides what the constructor takes
            return dict(list(inspect.signature(function.__init__).parameters.items())[1:])
        return inspect.signature(function).parameters
    except ValueError:  # a function written in C has none
        return {"fields": inspect.Parameter("fields", inspect.Parameter.VAR_KEYWORD)}


def _check_fields(kind: str, parameters: Mapping[str, inspect.Parameter], fields: Mapping[str, Any]) -> None:
    """Refuses fields that the function does not take, and missing ones."""
    named = {
        name: p
        for name, p in parameters.items()
        if name != "rngs" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    faults = []
    if all(p.kind != p.VAR_KEYWORD for p in parameters.values()):
        for name in fields:
            if name not in named:
                near = nearest(name, named)
                hint = f"it takes {', '.join(named)}" if named else "it takes no fields"
                hint = f"did you mean model.{near}?" if near else hint
                faults.append(f"model.{name}: {kind} takes no {name}; {hint}")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in fields:
            faults.append(f"model.{name}: is missing; {kind} needs it")
    if faults:
        raise ConfigError(faults)


def _parts(kind: str, made: Any) -> dict[str, Any]:
    names = ("init", "loss", "stages", "param_axes")
    if isinstance(made, nnx.Module):
        raise ConfigError(
            f"model.kind: {kind} returned a module that is made already; give it an `rngs` parameter, or "
            "return a function init(rngs) that makes it, so that it can be laid out over devices first"
        )
    if isinstance(made, Mapping):
        unknown = [str(key) for key in made if key not in names]
        if unknown:
            raise ConfigError(
                f"model.kind: {kind} returned {', '.join(unknown)}; it may return {', '.join(names)}"
            )
        parts = dict(made)
    elif hasattr(made, "init"):
        parts = {name: getattr(made, name) for name in names if hasattr(made, name)}
    else:
        parts = {"init": made}
    if not callable(parts.get("init")):
        raise ConfigError(
            f"model.kind: {kind} returned {type(made).__name__}; it returns a function init(rngs), or an "
            f"object or mapping with {', '.join(names)}"
        )
    loss, stages = parts.get("loss"), parts.get("stages")
    if loss is not None and not callable(loss):
        raise ConfigError(f"model.kind: the loss of {kind} is {type(loss).__name__}, not a function")
    if stages is not None and not isinstance(stages, Stages):
        raise ConfigError(f"model.kind: the stages of {kind} are {type(stages).__name__}, not a dsjax.Stages")
    if stages is not None and loss is not None:
        raise ConfigError(f"model.kind: {kind} returned loss and stages; stages say how the loss is made")
    return parts


def _guarded(kind: str, call: Callable[[], Result]) -> Result:
    try:
        return call()
    except DsjaxError:
        raise
    except Exception as error:
        raise ConfigError(_failure(kind, error)) from error


def _failure(kind: str, error: Exception) -> str:
    """The error's own message and the innermost place outside installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<")]
    own = [f for f in own if os.path.dirname(__file__) not in f.filename] or frames[-1:]
    place = f"{own[-1].filename}:{own[-1].lineno}"
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    return f"model.kind: {kind} failed at {place}: {type(error).__name__}: {error}"

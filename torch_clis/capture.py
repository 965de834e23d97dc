"""`record`: a recording of the attention calls of any torch model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from certify import DEFAULT_TOLERANCE
from torch_clis.ops import attention_op
from torch_clis.recorder import DEFAULT_MAX_BYTES, Recorder
from torch_clis.sdpa_calls import NotReadableError, hosted, read_sdpa_call

FUSED_MODULES = (
    torch.nn.MultiheadAttention,
    torch.nn.TransformerEncoder,
    torch.nn.TransformerEncoderLayer,
)
"""These choose another way of computing, with other rounding, while a function mode is active."""

_OUR_CALLS = (torch.ops.clis.attention, torch.ops.clis.attention.default)


@contextlib.contextmanager
def record(
    model: torch.nn.Module,
    path: str | Path | Recorder,
    *,
    keep_tensors: int = 0,
    max_bytes: int = DEFAULT_MAX_BYTES,
    tolerance: float = DEFAULT_TOLERANCE,
    prefix: str = "",
) -> Iterator[Recorder]:
    """Record the attention calls that ``model`` makes inside the block; it computes the same bits.

    ::

        with torch_clis.record(model, "calls.safetensors", keep_tensors=1):
            model(**inputs)

    Seen are calls of ``torch.nn.functional.scaled_dot_product_attention`` and of
    ``torch.ops.clis.attention`` by modules of the model, in the thread of the block. A layer is
    named after the module in whose forward the call happens; further calls of the same forward are
    ``name#2``, ``name#3``. Calls that torch compiled (``torch.compile``) are not seen, and those
    inside ``torch.nn.MultiheadAttention`` and ``torch.nn.TransformerEncoder`` only counted. Blocks
    can be nested. On devices other than CPU and XLA each call is copied to the host.

    Row sums are recorded where the log-sum-exp is known: of ``torch.ops.clis.attention``, and on
    the host, where it is computed beside the model's own attention.

    Args:
        model: any module.
        path: the file to write when the block ends without an error; or a `Recorder`, whose own
            settings then hold and which is saved by whoever made it.
        keep_tensors, max_bytes, tolerance: see `Recorder`.
        prefix: put before every layer's name, to tell two models apart.

    Yields:
        The recorder.

    Raises:
        TypeError: for a model that is no module.
        ValueError: as `Recorder`; at the end where no attention call was recorded.
        OSError: at the end where the file cannot be written.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model: got {type(model).__name__}; give a torch.nn.Module, of a pipeline the part "
            "that attends, such as pipe.transformer."
        )
    if path is None:
        raise ValueError("path: got None; give the file to write, or a Recorder.")
    if isinstance(path, Recorder):
        recorder = path
    else:
        recorder = Recorder(
            path, keep_tensors=keep_tensors, max_bytes=max_bytes, tolerance=tolerance
        )
    mode = _RecordingMode(recorder, _ModuleStack(model, prefix))
    with mode.stack.watched(mode), mode:
        yield recorder
    if recorder is not path:
        recorder.save()


@dataclass
class _Frame:
    """A module whose forward runs."""

    module: torch.nn.Module
    name: str
    calls: int = 0
    lifted: list[TorchFunctionMode] | None = None


class _ModuleStack:
    """Which modules of a model are running, innermost last.

    The hooks are torch's global ones, which a module does not see: some modules compute in another
    way when they carry hooks themselves. They ignore other threads and other models.
    """

    def __init__(self, model: torch.nn.Module, prefix: str) -> None:
        self._model = model
        self._names = {
            module: prefix + (name or type(model).__name__)
            for name, module in model.named_modules()
        }
        self._frames: list[_Frame] = []
        self._thread = threading.get_ident()

    def call_name(self) -> str | None:
        """Name of the attention call that happens now; None outside the model."""
        if not self._frames:
            return None
        frame = self._frames[-1]
        frame.calls += 1
        return frame.name if frame.calls == 1 else f"{frame.name}#{frame.calls}"

    @contextlib.contextmanager
    def watched(self, mode: _RecordingMode) -> Iterator[None]:
        """Keep the stack while the block runs."""

        def enter(module: torch.nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
                return
            name = self._names.get(module)
            if name is None:
                return
            if module is self._model:  # what an interrupt left there
                self._frames.clear()
            frame = _Frame(module, name)
            self._frames.append(frame)
            if isinstance(module, FUSED_MODULES):
                frame.lifted = _lift(mode)
                if frame.lifted is not None:
                    mode.recorder.leave_out(f"{type(module).__name__} computes it by itself")

        def leave(module: torch.nn.Module, args: Any, out: Any) -> None:
            if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
                return
            if not any(frame.module is module for frame in self._frames):
                return
            while True:
                frame = self._frames.pop()
                if frame.lifted is not None:
                    _put_back(mode, frame.lifted)
                if frame.module is module:
                    return

        before = register_module_forward_pre_hook(enter)
        try:
            after = register_module_forward_hook(leave, always_call=True)
        except BaseException:
            before.remove()
            raise
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._frames.clear()


class _RecordingMode(TorchFunctionMode):
    """Runs every function unchanged and records those that attend."""

    def __init__(self, recorder: Recorder, stack: _ModuleStack) -> None:
        super().__init__()
        self.recorder = recorder
        self.stack = stack

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        theirs = func is torch.nn.functional.scaled_dot_product_attention
        if (theirs or func in _OUR_CALLS) and not torch.compiler.is_compiling():
            name = self.stack.call_name()
            if name is not None:
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    if theirs:
                        _record_sdpa(self.recorder, name, args, kwargs)
                    else:
                        _record_own(self.recorder, name, args, kwargs, out)
        return out


def _record_sdpa(
    recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        call = read_sdpa_call(args, kwargs)
        query, key, value = (hosted(part) for part in (call.query, call.key, call.value))
        attn_mask = hosted(call.attn_mask)
        assert query is not None and key is not None and value is not None
        lse = None
        if query.device.type == "cpu":
            settings = (attn_mask, None, call.scale, call.causal, recorder.tolerance, "auto")
            _, lse, _ = attention_op(query, key, value, *settings)
        recorder.add(
            name,
            query,
            key,
            value,
            lse=lse,
            scale=call.scale,
            causal=call.causal,
            attn_mask=attn_mask,
        )
    except (NotReadableError, NotImplementedError, ValueError) as error:
        recorder.leave_out(str(error).rstrip("."))


def _record_own(
    recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> None:
    names = [argument.name for argument in torch.ops.clis.attention.default._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    _, lse, certificate = out
    recorder.add(
        name,
        given["query"],
        given["key"],
        given["value"],
        lse=lse,
        certificate=certificate,
        scale=given["scale"],
        causal=given["causal"],
        attn_mask=given["attn_mask"],
        key_lengths=given["key_lengths"],
    )


def _lift(mode: TorchFunctionMode) -> list[TorchFunctionMode] | None:
    """Take ``mode`` off the stack of function modes; returns those above it, None if absent."""
    if mode not in torch.overrides._get_current_function_mode_stack():
        return None
    above: list[TorchFunctionMode] = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)
    return above


def _put_back(mode: TorchFunctionMode, above: list[TorchFunctionMode]) -> None:
    """Undo `_lift`, below those of the modes above it that are still on the stack."""
    lifted: list[TorchFunctionMode] = []
    while (stack := torch.overrides._get_current_function_mode_stack()) and stack[-1] in above:
        lifted.append(_pop_mode())
    _push_mode(mode)
    for other in reversed(lifted):
        _push_mode(other)

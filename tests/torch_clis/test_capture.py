"""`torch_clis.record`: the same bits, the right names, the right arguments."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.modules import module as module_hooks

import torch_clis
from certify.recording import LayerPasses, read_recording
from tests.torch_clis.helpers import definition, largest_error
from torch_clis import Recorder
from torch_clis.sdpa_calls import read_sdpa_call

sdpa = functional.scaled_dot_product_attention


class Attention(torch.nn.Module):
    """Attends ``calls`` times to what it gets, [B, H, S, D]."""

    def __init__(self, calls: int = 1, **options: Any) -> None:
        super().__init__()
        self.calls, self.options = calls, options

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            hidden = functional.scaled_dot_product_attention(hidden, hidden, hidden, **self.options)
        return hidden


class Model(torch.nn.Module):
    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(layers)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def _hidden(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (1, 2, 9, 16), generator=torch.Generator().manual_seed(1))


def _layers(recorder: Recorder) -> dict[str, LayerPasses]:
    return {layer.name: layer for layer in recorder.recording().layers}


def _llama() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaModel(LlamaConfig(**sizes, **heads, attn_implementation="sdpa"))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    return model, {"input_ids": torch.arange(24).view(2, 12), "attention_mask": mask}


def _encoder() -> tuple[torch.nn.Module, dict[str, Any]]:
    layer = torch.nn.TransformerEncoderLayer(16, 2, dim_feedforward=16, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2), {"src": _hidden(2, 7, 16)}


class _SelfAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.after = Attention()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.inner(hidden, hidden, hidden, need_weights=False)
        return self.after(hidden)


MODELS = {
    "transformers": _llama,
    "encoder": _encoder,
    "multihead": lambda: (_SelfAttention(), {"hidden": _hidden(2, 7, 16)}),
    "dropout": lambda: (Attention(dropout_p=0.3), {"hidden": _hidden()}),
}


def _tensor(out: Any) -> torch.Tensor:
    found = getattr(out, "last_hidden_state", out)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_same_bits(kind: str, training: bool) -> None:
    """Fault: recording draws random numbers, or makes torch take another path or another hook."""
    torch.manual_seed(0)
    model, inputs = MODELS[kind]()
    model.train(training)
    results = []
    for recording in (False, True):
        model.zero_grad()
        torch.manual_seed(1)
        if recording:
            with torch_clis.record(model, Recorder(keep_tensors=1)) as recorder:
                out = _tensor(model(**inputs))
        else:
            out = _tensor(model(**inputs))
        if training:
            out.square().sum().backward() if out.requires_grad else None
        with torch.no_grad():
            torch.manual_seed(2)
            silent = model(**inputs) if not recording else None
            if recording:
                with torch_clis.record(model, recorder):
                    silent = model(**inputs)
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([out.detach(), _tensor(silent), *grads])
    for plain, recorded in zip(*results, strict=True):
        assert torch.equal(plain, recorded)
    assert recorder.passes_recorded + recorder.passes_not_recorded > 0


def test_names_and_pass_numbers(tmp_path: Path) -> None:
    """Fault: a call is booked on a parent, on the last module, or on the call before it."""
    shared = Attention()
    model = Model(Attention(), Model(shared, Attention(calls=3)), shared)
    path = tmp_path / "calls.safetensors"
    with torch_clis.record(model, path, prefix="net.") as recorder:
        model(_hidden())
        functional.scaled_dot_product_attention(_hidden(), _hidden(), _hidden())  # not the model's
        model(_hidden())
        model.blocks[0](_hidden())
    passes = {layer.name: layer.passes.tolist() for layer in read_recording(path).layers}
    assert passes == {
        "net.blocks.0": [0, 1, 2],
        "net.blocks.1.blocks.0": [0, 1, 2, 3],
        "net.blocks.1.blocks.1": [0, 1],
        "net.blocks.1.blocks.1#2": [0, 1],
        "net.blocks.1.blocks.1#3": [0, 1],
    }
    with torch_clis.record(shared, Recorder()) as recorder:
        shared(_hidden())
    assert list(_layers(recorder)) == ["Attention"]


def test_nested_recordings() -> None:
    """Fault: the inner block hides calls from the outer, or its own work is recorded by it."""
    model = Model(Attention(), _SelfAttention(), Attention())
    with torch_clis.record(model, Recorder()) as outer:
        with torch_clis.record(model.blocks[1], Recorder(), prefix="inner.") as inner:
            model(_hidden(2, 7, 16))
            depth = torch._C._len_torch_function_stack()
            model(_hidden(2, 7, 16))
            assert torch._C._len_torch_function_stack() == depth == 2
        model(_hidden(2, 7, 16))
    found = {name: layer.passes.tolist() for name, layer in _layers(outer).items()}
    assert found == {name: [0, 1, 2] for name in ("blocks.0", "blocks.1.after", "blocks.2")}
    assert {name: layer.passes.tolist() for name, layer in _layers(inner).items()} == {
        "inner.after": [0, 1]
    }


class _Failing(torch.nn.Module):
    error: type[BaseException] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error("stopped")
        return hidden


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_errors_restore_everything(error: type[BaseException], tmp_path: Path) -> None:
    """Fault: hooks or the function mode outlive the block; calls after an error get its name."""
    failing = _Failing()
    model = Model(Model(failing), Attention())
    hooks = (module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks)
    before = [dict(found) for found in hooks]
    depth = torch._C._len_torch_function_stack()
    path = tmp_path / "calls.safetensors"
    with torch_clis.record(model, path) as recorder:
        failing.error = error
        with pytest.raises(error, match="stopped"):
            model(_hidden())
        failing.error = None
        model(_hidden())
    assert list(_layers(recorder)) == ["blocks.1"]
    path.unlink()
    failing.error = error
    with pytest.raises(error, match="stopped"), torch_clis.record(model, path):
        model(_hidden())
    assert [dict(found) for found in hooks] == before
    assert torch._C._len_torch_function_stack() == depth
    assert list(tmp_path.iterdir()) == []


def test_fused_modules_keep_other_modes_in_place() -> None:
    """Fault: the mode taken off for torch's own encoder takes others with it, or stays off."""

    class Counting(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += func is functional.scaled_dot_product_attention
            return func(*args, **(kwargs or {}))

    inner = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    model = _SelfAttention()
    model.inner = inner
    with (
        pytest.warns(UserWarning, match="MultiheadAttention computes it by itself"),
        torch_clis.record(model, Recorder()) as recorder,
        Counting() as counting,
    ):
        model(_hidden(2, 7, 16))
        model(_hidden(2, 7, 16))
    assert counting.calls == 2
    assert (recorder.passes_recorded, recorder.passes_not_recorded) == (2, 2)


class _Catching(torch.nn.Module):
    """Attends after its inner module failed."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError, KeyboardInterrupt):
            self.inner(hidden)
        return functional.scaled_dot_product_attention(hidden, hidden, hidden)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_errors_that_the_model_catches(error: type[BaseException]) -> None:
    """Fault: a module that failed stays on the stack and takes the calls of those around it.

    torch runs no hook after a KeyboardInterrupt, so only the modules further out are set right.
    """
    failing = _Failing()
    failing.error = error
    model = Model(_Catching(Model(_Catching(failing))))
    with torch_clis.record(model, Recorder()) as recorder:
        model(_hidden())
    names = list(_layers(recorder))
    assert "blocks.0" in names
    assert ("blocks.0.inner.blocks.0" in names) == (error is RuntimeError)


def test_other_threads_are_left_alone() -> None:
    """Fault: a model that runs in another thread appears in this recording, or lends its name."""
    inside, done = threading.Event(), threading.Event()

    class Waiting(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert done.wait(60)
            return functional.scaled_dot_product_attention(hidden, hidden, hidden)

    class Beside(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            thread.start()
            assert inside.wait(60)  # the other thread is within Waiting now
            return functional.scaled_dot_product_attention(hidden, hidden, hidden)

    model, other = Model(Beside(), Waiting()), Model(Attention())
    thread = threading.Thread(target=model.blocks[1], args=(_hidden(),))
    with torch_clis.record(model, Recorder()) as recorder:
        model.blocks[0](_hidden())
        done.set()
        thread.join()
        other(_hidden())
    assert {name: layer.passes.tolist() for name, layer in _layers(recorder).items()} == {
        "blocks.0": [0]
    }


def test_our_own_op_comes_with_its_certificate() -> None:
    """Fault: a model that runs our attention is recorded as if something else had run."""

    class Ours(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            out = torch_clis.attention(hidden, hidden, hidden, scale=0.5, is_causal=True)
            assert isinstance(out, torch.Tensor)
            return out

    model = Model(Ours(), Attention())
    with torch_clis.record(model, Recorder()) as recorder:
        model(_hidden())
    layers = _layers(recorder)
    ours = layers["blocks.0"]
    assert (ours.settings.scale, ours.settings.causal, ours.settings.heads) == (0.5, True, 9)
    assert (ours.certificate[..., 0] == 3).all()
    assert torch.from_numpy(layers["blocks.1"].certificate).isnan().all()


def _mask(*shape: int, additive: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(shape, generator=generator) < 0.6
    mask[..., 0] = True
    return torch.randn(shape, generator=generator).masked_fill(~mask, -1e30) if additive else mask


Shapes = tuple[tuple[int, ...], tuple[int, ...]]
CALLS: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "plain": (((2, 4, 9, 16), (2, 4, 11, 16)), {}),
    "gqa": (((2, 4, 9, 16), (2, 2, 11, 16)), {"enable_gqa": True}),
    "scale": (((2, 4, 9, 16), (2, 4, 11, 16)), {"scale": 0.7}),
    "causal": (((2, 4, 9, 16), (2, 4, 9, 16)), {"is_causal": True}),
    "causal-wide": (((2, 4, 9, 16), (2, 4, 11, 16)), {"is_causal": True}),
    "causal-tall": (((2, 4, 11, 16), (2, 4, 9, 16)), {"is_causal": True}),
    "bool": (((2, 4, 9, 16), (2, 4, 11, 16)), {"attn_mask": _mask(2, 1, 9, 11)}),
    "bool-2d": (((2, 4, 9, 16), (2, 4, 11, 16)), {"attn_mask": _mask(9, 11)}),
    "additive": (((2, 4, 9, 16), (2, 4, 11, 16)), {"attn_mask": _mask(4, 1, 11, additive=True)}),
    "3d": (((3, 9, 16), (3, 11, 16)), {"attn_mask": _mask(3, 9, 11)}),
    "2d": (((9, 16), (11, 16)), {"attn_mask": _mask(9, 11, additive=True)}),
    "5d": (((2, 3, 4, 9, 16), (2, 3, 4, 11, 16)), {"attn_mask": _mask(2, 1, 4, 9, 11)}),
    "5d-mask": (((2, 3, 4, 9, 16), (2, 3, 4, 11, 16)), {"attn_mask": _mask(4, 9, 11)}),
    "broadcast": (((2, 4, 9, 16), (1, 4, 11, 16)), {}),
}


@pytest.mark.parametrize("kind", CALLS)
def test_arguments_are_read_as_torch_means_them(kind: str) -> None:
    """Fault: causal bottom-right for top-left, a mask along the wrong axis, heads for batch."""
    (query_shape, key_shape), options = CALLS[kind]
    query, key, value = _hidden(*query_shape), _hidden(*key_shape), _hidden(*key_shape) * 2
    doubles: dict[str, Any] = {
        name: option.double() if torch.is_tensor(option) and option.is_floating_point() else option
        for name, option in options.items()
    }
    wanted = sdpa(query.double(), key.double(), value.double(), **doubles)
    call = read_sdpa_call((query, key, value), options)
    got, _ = definition(
        call.query,
        call.key,
        call.value,
        scale=call.scale,
        attn_mask=call.attn_mask,
        is_causal=call.causal,
    )
    assert largest_error(got.transpose(1, 2).reshape(wanted.shape), wanted) < 1e-12


def test_positional_arguments_and_wide_values() -> None:
    """Fault: dropout taken for the causal flag; max|v| of some channels only."""
    query, key = _hidden(1, 2, 9, 16), _hidden(1, 2, 9, 16)
    value = _hidden(1, 2, 9, 40)
    call = read_sdpa_call((query, key, value, None, 0.5, True), {"scale": 0.3})
    assert (call.causal, call.scale, call.attn_mask) == (True, 0.3, None)
    assert call.value.shape == call.key.shape
    assert torch.equal(call.value.abs().amax(-1), value.abs().amax(-1).transpose(1, 2))


def test_calls_that_cannot_be_recorded_are_counted() -> None:
    """Fault: a float64 model fails, or its recording claims to be complete."""
    model = Model(Attention())
    with (
        pytest.warns(
            UserWarning, match=r"attention call not recorded: it is in torch.float64"
        ) as w,
        torch_clis.record(model, Recorder()) as recorder,
    ):
        model(_hidden().double())
        model(_hidden().double())
        model(_hidden())
    assert len(w) == 1
    assert (recorder.passes_recorded, recorder.passes_not_recorded) == (1, 2)


def test_a_model_without_calls(tmp_path: Path) -> None:
    """Fault: an empty file, or a pipeline taken for a model."""
    path = tmp_path / "calls.safetensors"
    with (
        pytest.raises(ValueError, match="no attention call was recorded"),
        torch_clis.record(torch.nn.Linear(2, 2), path),
    ):
        pass
    with pytest.raises(TypeError, match=r"model: got dict; give a torch.nn.Module.*transformer"):
        torch_clis.record({}, path).__enter__()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"path: got None; give the file"):
        torch_clis.record(torch.nn.Linear(2, 2), None).__enter__()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"path: .* is a directory"):
        torch_clis.record(torch.nn.Linear(2, 2), tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_lazy_device_compiles_once(xla_device: torch.device) -> None:
    """Fault: recording waits for the device, or makes every step another program."""
    import torch_xla
    from torch_xla.debug import metrics

    model, hidden = Model(Attention(), Attention()), _hidden().to(xla_device)
    torch_xla.sync()
    with torch_clis.record(model, Recorder(keep_tensors=1)) as recorder:
        transfers = metrics.metric_data("TransferFromDeviceTime")

        def step() -> int:
            out = model(hidden)
            torch_xla.sync()
            assert out.shape == hidden.shape
            return int(metrics.counter_value("UncachedCompile"))

        first = step()
        assert [step() for _ in range(3)] == [first] * 3
        assert metrics.metric_data("TransferFromDeviceTime") == transfers
    layers = _layers(recorder)
    assert [layer.passes.tolist() for layer in layers.values()] == [[0, 1, 2, 3]] * 2
    assert int(metrics.counter_value("UncachedCompile")) == first

"""`CLiSProcessor` in a Wan transformer against diffusers' own processor."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

from certify import BOUND_NAMES, VERDICTS
from tests.torch_clis.helpers import on_host
from torch_clis import CLiSProcessor, Recorder

IMAGE_TOKENS = 20
VARIANTS = {
    "plain": {"image": False, "fused": False},
    "fused": {"image": False, "fused": True},
    "image-keys": {"image": True, "fused": False},
    "image-keys-fused": {"image": True, "fused": True},
}


def _transformer(image: bool = False, fused: bool = False) -> WanTransformer3DModel:
    torch.manual_seed(3)
    heads, head_dim = 2, 24
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
        image_dim=16 if image else None,
        added_kv_proj_dim=heads * head_dim if image else None,
    ).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):  # so that a missing norm weight shows
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    if fused:
        model.fuse_qkv_projections()
    return model


def _inputs(image: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    inputs = {
        "hidden_states": normal(2, 4, 3, 12, 12),
        "timestep": torch.tensor([900, 300]),
        "encoder_hidden_states": normal(2, 512, 32),
    }
    if image:
        inputs["encoder_hidden_states_image"] = normal(2, IMAGE_TOKENS, 16)
    return inputs


def _run(model: WanTransformer3DModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(**inputs, return_dict=False)[0]
    return out


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_diffusers(variant: str, device: torch.device) -> None:
    """Fault: a norm, a rotation, a projection or the image's attention is left out or misplaced."""
    options = VARIANTS[variant]
    model, inputs = _transformer(**options), _inputs(options["image"])
    wanted = _run(model, inputs)
    processor = CLiSProcessor()
    model.set_attn_processor(processor)
    processor.name_layers(model)
    model = model.to(device)
    (got,) = on_host(_run(model, {name: tensor.to(device) for name, tensor in inputs.items()}))
    assert _relative(got, wanted) < 1e-5
    layers = {row["layer"] for row in processor.totals()}
    kinds = {"attn1", "attn2"} | ({"attn2.image"} if options["image"] else set())
    assert layers == {f"blocks.{block}.{kind}" for block in (0, 1) for kind in kinds}


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_attention_mask_is_applied(kind: str, device: torch.device) -> None:
    """Fault: a mask handed to the attention module is dropped."""
    torch.manual_seed(5)
    attn = WanAttention(dim=48, heads=2, dim_head=24, processor=WanAttnProcessor()).eval()
    hidden_states = torch.randn(2, 30, 48)
    mask = torch.rand(2, 1, 30, 30) < 0.7
    if kind == "additive":
        mask = torch.randn(2, 1, 30, 30).masked_fill(~mask, -1e9)
    with torch.no_grad():
        wanted = attn(hidden_states, None, mask, None)
        unmasked = attn(hidden_states, None, None, None)
        attn.set_processor(CLiSProcessor())
        attn = attn.to(device)
        got = attn(hidden_states.to(device), None, mask.to(device), None)
    assert _relative(unmasked, wanted) > 1e-2
    assert _relative(got.cpu(), wanted) < 1e-5


def test_steps_compile_once(xla_device: torch.device) -> None:
    """Fault: totals enter the first step's graph as constants and the second's as inputs."""
    import torch_xla
    from torch_xla.debug import metrics

    model = _transformer()
    processor = CLiSProcessor()
    model.set_attn_processor(processor)
    model = model.to(xla_device)
    inputs = {name: tensor.to(xla_device) for name, tensor in _inputs().items()}
    torch_xla.sync()

    def step() -> int:
        out = _run(model, inputs)
        torch_xla.sync()
        assert out.shape == inputs["hidden_states"].shape
        return int(metrics.counter_value("UncachedCompile"))

    transfers = metrics.metric_data("TransferFromDeviceTime")
    first = step()
    assert [step() for _ in range(3)] == [first] * 3
    assert metrics.metric_data("TransferFromDeviceTime") == transfers
    blocks = [row["blocks"] for row in processor.totals()]
    assert int(metrics.counter_value("UncachedCompile")) == first
    assert blocks == [4 * 2] * 8  # 4 steps, 2 batch entries, one query block; 2 layers of 2 kinds


def test_short_context_of_an_image_model_is_refused() -> None:
    """Fault: text tokens are taken for image tokens and the other way round, silently."""
    model = _transformer(image=True)
    model.set_attn_processor(CLiSProcessor())
    inputs = _inputs(image=True)
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :300]
    with pytest.raises(ValueError, match=r"encoder_hidden_states: got 320 tokens.*512"):
        _run(model, inputs)


def test_unknown_attention_module_is_named() -> None:
    """Fault: another model's attention is computed as if it were Wan's."""
    with pytest.raises(TypeError, match=r"attn: got torch.nn.modules.linear.Linear"):
        CLiSProcessor()(torch.nn.Linear(2, 2), torch.zeros(1, 3, 2))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tolerance": 0.0}, ValueError, r"tolerance: got 0.0"),
        ({"path": "best"}, ValueError, r"path: got 'best'"),
        ({"record": "no/such/directory/q.safetensors"}, ValueError, r"path: no/such.*lies in none"),
        ({"record": Recorder(tolerance=2.0**-9)}, ValueError, r"record: its tolerance.*tolerance="),
    ],
)
def test_settings_are_validated(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Fault: a wrong setting surfaces in the middle of a denoising loop."""
    with pytest.raises(error, match=message):
        CLiSProcessor(**options)


def test_name_layers_needs_the_processor() -> None:
    """Fault: naming before installing does nothing and says nothing."""
    with pytest.raises(ValueError, match=r"set_attn_processor"):
        CLiSProcessor().name_layers(_transformer())


class _Layer(torch.nn.Module):
    processor: Any = None


def _packed(verdicts: list[int], gap: float, budget: float, bound: str) -> torch.Tensor:
    """A certificate [1, 2, blocks, 7]; head 1 is exact throughout."""
    certificate = torch.zeros(1, 2, len(verdicts), 7)
    certificate[0, 0, :, 0] = torch.tensor(verdicts, dtype=torch.float32)
    certificate[0, 0, :, 1], certificate[0, 0, :, 2] = gap, budget
    certificate[0, 0, :, 3] = 1e-5
    certificate[0, 0, :, 4] = BOUND_NAMES.index(bound)
    certificate[0, 1, :, 0] = VERDICTS.index("exact")
    return certificate


def _processor_with_totals(device: torch.device) -> CLiSProcessor:
    processor = CLiSProcessor()
    layer = _Layer()
    processor._totals.set_name(layer, "blocks.0.attn1")
    for certificate in (
        _packed([0, 0, 1], 90.0, 100.0, "ball"),
        _packed([0, 2, 1], 120.5, 100.0, "blocks+sentinels"),
        _packed([2, 2, 2], float("nan"), 100.0, "none"),
    ):
        processor._totals.add(layer, "", certificate.to(device))
    return processor


def test_totals_add_up(device: torch.device) -> None:
    """Fault: counts, the smallest margin or the bounds are those of the last call or other head."""
    judged, exact = _processor_with_totals(device).totals()
    assert judged == {
        "layer": "blocks.0.attn1",
        "head": 0,
        "certified": 3,
        "verified": 2,
        "recomputed": 4,
        "exact": 0,
        "blocks": 9,
        "smallest_margin_bits": -20.5,
        "bound_used": {"none": 3, "ball": 3, "blocks+sentinels": 3},
        "largest_error_bound": pytest.approx(1e-5),
    }
    assert exact["exact"] == exact["blocks"] == 9
    assert exact["smallest_margin_bits"] is None
    json.dumps([judged, exact], allow_nan=False)


def test_totals_of_two_devices_are_one_row(xla_device: torch.device) -> None:
    """Fault: a model that moved from CPU to XLA shows each layer twice."""
    processor, layer = CLiSProcessor(), _Layer()
    for device in (torch.device("cpu"), xla_device):
        processor._totals.add(layer, "", _packed([0], 1.0, 4.0, "ball").to(device))
    rows = processor.totals()
    assert [(row["head"], row["blocks"]) for row in rows] == [(0, 2), (1, 2)]


def test_summary_says_what_the_totals_say() -> None:
    """Fault: a share of the wrong total, a column under another's heading, a lost layer name."""
    summary = _processor_with_totals(torch.device("cpu")).summary()
    assert repr(summary) == str(summary) and "blocks.0.attn1" in str(summary)
    table = summary.__rich__()
    columns = {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}
    assert columns["layer"] == ["blocks.0.attn1", "blocks.0.attn1"]
    assert columns["head"] == ["0", "1"]
    shares = {name: columns[name] for name in VERDICTS}
    assert shares == {
        "certified": ["33.3%", "0%"],
        "verified": ["22.2%", "0%"],
        "recomputed": ["44.4%", "0%"],
        "exact": ["0%", "100%"],
    }
    assert columns["margin"] == ["-20.5", "-"]


def test_reset_keeps_names_and_copies_start_empty() -> None:
    """Fault: a second clip's shares include the first's; deepcopy of a model fails or shares."""
    model, inputs = _transformer(), _inputs()
    processor = CLiSProcessor(tolerance=2.0**-10, path="online")
    model.set_attn_processor(processor)
    processor.name_layers(model, prefix="transformer.")
    _run(model, inputs)
    processor.reset()
    assert processor.totals() == []
    _run(model, inputs)
    assert processor.totals()[0]["layer"] == "transformer.blocks.0.attn1"
    for other in (copy.deepcopy(processor), pickle.loads(pickle.dumps(processor))):
        assert (other.tolerance, other.path, other.totals()) == (2.0**-10, "online", [])

"""Lowering JAX functions into lazy graphs, its cache, and JAX staying away from the chip."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from jaxlib import xla_client

from torch_clis import lowering
from torch_clis.programs import OLDEST_JAX_FOR_TPU, attention_program


def _three_outputs(x: Any, unused: Any, *, factor: float, platform: str) -> tuple[Any, Any, Any]:
    """A tuple, an aliased Pallas output, a conditional and an unused argument in one function."""
    del unused

    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...] * factor

    scaled = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        input_output_aliases={0: 0},
        interpret=platform != "tpu",
    )(x)
    branched = jax.lax.cond(jnp.any(scaled > 100), lambda a: a - 1, lambda a: a + 1, scaled)
    return branched, (scaled > 0).astype(jnp.int8), jnp.sum(scaled)


def _one_output(x: Any, *, platform: str) -> Any:
    del platform
    return x + 1


def _call(tensor: torch.Tensor, factor: float) -> list[torch.Tensor]:
    return lowering.call(_three_outputs, [tensor, tensor], name="xla::clis_test", factor=factor)


@pytest.mark.parametrize("factor", [2.0, 200.0])
def test_tuples_aliases_and_conditionals(factor: float, xla_device: torch.device) -> None:
    """Fault: outputs in another order, a branch lost, or the caller's tensor overwritten."""
    host = torch.linspace(-1, 1, 16).reshape(2, 8)
    tensor = host.to(xla_device)
    branched, sign, total = _call(tensor, factor)
    scaled = host * factor
    assert torch.equal(branched.cpu(), scaled - 1 if (scaled > 100).any() else scaled + 1)
    assert sign.dtype == torch.int8 and torch.equal(sign.cpu(), (scaled > 0).to(torch.int8))
    assert torch.allclose(total.cpu(), scaled.sum(), atol=1e-4)
    assert torch.equal(tensor.cpu(), host)


def test_single_array(xla_device: torch.device) -> None:
    """Fault: a function that returns no tuple yields rows instead of one tensor."""
    tensor = torch.ones(3, 4).to(xla_device)
    (out,) = lowering.call(_one_output, [tensor], name="xla::clis_test")
    assert torch.equal(out.cpu(), torch.full((3, 4), 2.0))


def test_cache_distinguishes_what_changes_the_program(xla_device: torch.device) -> None:
    """Fault: a program is reused for other shapes, dtypes or static arguments, or never reused."""
    tensor = torch.ones(5, 7).to(xla_device)
    start = lowering.cache_info()
    _call(tensor, 3.0)
    _call(tensor + 1, 3.0)
    same = lowering.cache_info()
    assert (same.misses, same.hits) == (start.misses + 1, start.hits + 1)
    for other, factor in (
        (tensor, 4.0),
        (tensor.bfloat16(), 3.0),
        (torch.ones(7, 5).to(xla_device), 3.0),
    ):
        _call(other, factor)
    assert lowering.cache_info().misses == same.misses + 3
    with lowering.target_platform("tpu"):
        lowering.call(_one_output, [tensor], name="xla::clis_test")
    lowering.call(_one_output, [tensor], name="xla::clis_test")
    assert lowering.cache_info().misses == same.misses + 5


def test_concurrent_callers_lower_once(xla_device: torch.device) -> None:
    """Fault: two threads lower one signature, which makes two programs for XLA to compile."""
    tensor = torch.ones(9, 3).to(xla_device)
    start = lowering.cache_info()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: _call(tensor, 5.0), range(16)))
    assert lowering.cache_info().misses == start.misses + 1
    assert lowering.cache_info().hits == start.hits + 15
    assert all(torch.equal(total.cpu(), torch.tensor(135.0)) for _, _, total in results)


def test_cache_is_bounded_and_keeps_what_is_used() -> None:
    """Fault: programs pile up, or the one in use is thrown out."""
    cache = lowering.ProgramCache(capacity=2)
    built: list[str] = []

    def build(name: str) -> str:
        built.append(name)
        return name

    for name in ("a", "b", "a", "c", "a", "b"):
        assert cache.get(name, lambda name=name: build(name)) == name  # type: ignore[misc]
    assert built == ["a", "b", "c", "b"]
    assert cache.info() == lowering.CacheInfo(hits=2, misses=4, size=2)


def test_hits_do_not_wait_for_a_miss() -> None:
    """Fault: a hit waits while another thread lowers for half a second."""
    cache = lowering.ProgramCache(capacity=4)
    cache.get("held", lambda: 1)
    started, finish = threading.Event(), threading.Event()

    def slow_build() -> int:
        started.set()
        assert finish.wait(30)
        return 2

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(cache.get, "new", slow_build)
        assert started.wait(30)
        assert cache.get("held", lambda: 3) == 1  # would deadlock if it waited
        finish.set()
        assert pending.result(30) == 2


def test_a_failed_lowering_is_not_kept() -> None:
    """Fault: after one error every later call fails or returns nothing."""
    cache = lowering.ProgramCache(capacity=4)

    def fail() -> int:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.get("key", fail)
    assert cache.get("key", lambda: 7) == 7


def test_target_platform_is_local(xla_device: torch.device) -> None:
    """Fault: tracing for TPU in one thread changes what another one lowers."""
    assert lowering.platform_of(xla_device) == "cpu"
    with lowering.target_platform("tpu"):
        assert lowering.platform_of(xla_device) == "tpu"
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lowering.platform_of, xla_device).result() == "cpu"
        with lowering.target_platform("cpu"):
            assert lowering.platform_of(xla_device) == "cpu"
    assert lowering.platform_of(xla_device) == "cpu"
    wrong = pytest.raises(ValueError, match=r"platform: got 'gpu'; give one of tpu, cpu")
    with wrong, lowering.target_platform("gpu"):
        pass


def test_unsupported_dtype_is_named(xla_device: torch.device) -> None:
    """Fault: int64 is silently narrowed to int32 inside JAX and no longer fits the input."""
    tensor = torch.ones(3, dtype=torch.int64).to(xla_device)
    with pytest.raises(TypeError, match=r"dtype: got torch.int64"):
        lowering.call(_one_output, [tensor], name="xla::clis_test")


def _run(code: str, **environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**kept, "PJRT_DEVICE": "CPU", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


_ANY_CALL: dict[str, Any] = {
    "has_mask": False,
    "has_key_lengths": False,
    "has_promise": False,
    "scale": 1.0,
    "causal": False,
    "tolerance": 2.0**-12,
    "path": "auto",
}


def test_a_jax_that_is_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a TPU program from a jax whose kernels were never tried there, or an obscure error."""
    monkeypatch.setattr(jax, "__version_info__", (0, 6, 2))
    with pytest.raises(NotImplementedError, match=r"jax: .* needs jax 0\.7\.1 or newer"):
        attention_program(platform="tpu", **_ANY_CALL)


def test_jax_backends_stay_down_on_a_tpu_vm() -> None:
    """Fault: lowering starts JAX's TPU client beside PyTorch/XLA's; or writes exp2 as exp; or in a
    form that the libtpu of torch_xla 2.9 refuses.

    JAX_FORCE_TPU_INIT makes JAX believe that it is on a TPU VM. A jax that is too old is refused.
    """
    if jax.__version_info__ < OLDEST_JAX_FOR_TPU:
        with pytest.raises(NotImplementedError, match="jax: "):
            attention_program(platform="tpu", **_ANY_CALL)
        return
    out = _run(
        """
        import base64, re
        import torch
        import torch_clis.ops
        from torch_clis import lowering
        from torch_clis.programs import attention_program, attention_backward_program
        from functools import partial
        from jax._src import cloud_tpu_init, xla_bridge
        from jaxlib.mlir import ir
        assert cloud_tpu_init.running_in_cloud_tpu_vm
        query = ((1, 200, 2, 128), torch.bfloat16)
        lse = ((1, 2, 200), torch.float32)
        key = ((1, 3000, 2, 128), torch.bfloat16)
        common = dict(
            has_mask=False, has_key_lengths=False, scale=0.1, causal=False, platform="tpu"
        )
        settings = dict(tolerance=2**-12, path="auto", has_promise=False)
        forward = partial(attention_program, **settings, **common)
        proto = lowering.lower_to_hlo_proto(forward, [query, key, key], "tpu")
        backward = partial(attention_backward_program, **common)
        lowering.lower_to_hlo_proto(backward, [query, key, key, lse, query], "tpu")
        assert cloud_tpu_init.running_in_cloud_tpu_vm
        print("backends", len(xla_bridge._backends))
        kernels = re.findall(r'"body": ?"([^"]+)"', proto.decode("latin-1"))
        context = ir.Context()
        context.allow_unregistered_dialects = True
        texts = [str(ir.Module.parse(base64.b64decode(body), context)) for body in kernels]
        versions = {re.search(r"stable_mosaic.version = (\\d+)", text)[1] for text in texts}
        print("kernels", len(texts), "exp2", sum("exp2" in text for text in texts))
        print("exp", sum("math.exp\\"" in text for text in texts), "versions", *versions)
        """,
        JAX_FORCE_TPU_INIT="1",
    )
    assert "backends 0" in out
    printed = re.search(r"kernels (\d+) exp2 (\d+)", out)
    assert printed and int(printed[1]) >= 3  # statistics, fixed stabilizer, online
    assert int(printed[2]) == 2
    assert "exp 0 versions 7\n" in out


def test_platform_under_spmd() -> None:
    """Fault: the hardware of SPMD's virtual device is asked for, which has none."""
    out = _run(
        """
        import torch_xla.runtime as xr
        xr.use_spmd()
        import torch, torch_xla
        from torch_clis import lowering
        print(lowering.platform_of(torch_xla.device()))
        """,
        CPU_NUM_DEVICES="2",
        JAX_PLATFORMS="cpu",
    )
    assert out.split() == ["cpu"]


def test_import_needs_torch_only() -> None:
    """Fault: `import torch_clis` pulls in an optional dependency."""
    out = _run(
        """
        import sys
        for name in ("torch_xla", "diffusers", "jax", "jax_kernels", "transformers"):
            sys.modules[name] = None
        import torch_clis
        print(sorted(torch_clis.__all__))
        try:
            torch_clis.nothing
        except AttributeError as error:
            print(error)
        """
    )
    names = ["CLiSProcessor", "Recorder", "attention", "record", "scaled_dot_product_attention"]
    assert str(names) in out
    assert "no attribute 'nothing'" in out


def test_x64_stays_outside() -> None:
    """Fault: a caller's jax_enable_x64 makes a program of float64."""
    with jax.experimental.enable_x64():
        proto = lowering.lower_to_hlo_proto(_offsets, [((4, 4), torch.float32)], "cpu")
    assert "f64" not in xla_client.XlaComputation(proto).as_hlo_text()


def _offsets(x: Any) -> Any:
    return x + jnp.arange(4.0).sum()

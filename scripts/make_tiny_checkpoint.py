"""Write a tiny, complete, randomly initialised Wan checkpoint in diffusers' own format.

It holds every part of a real one (tokenizer, text encoder, transformer, VAE, scheduler), so the
whole loading path of `WanPipeline.from_pretrained` runs offline. Its pictures are abstract:
nothing was trained.

Example:  python scripts/make_tiny_checkpoint.py build/tiny-wan --seed 0
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from command_line import UserError, console, run

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

# Wan 2.2 hands over to its low-noise expert at this share of the training steps.
WAN_2_2_BOUNDARY_RATIO = 0.875
# Gains on the query/key norms per (layer, head), cycled over the layers. The logits of a head have
# a standard deviation of about 1.4 * gain**2 bits, so the heads range from smooth to sharp, and
# each verdict of the certificate occurs. The sharpest gain was chosen after trying 5 (nothing is
# recomputed) to 16: the largest float32 difference of CLiS from native latents, one outlier of
# rounding, was 3e-6 at 10, 9e-6 at 12 and 7e-6 at 16 (online: 6e-6, 5e-6, 7e-6), and the root mean
# square 1e-6 throughout. The demo's bound of 1e-5 therefore speaks of logits up to this sharpness.
HEAD_GAINS = ((1.0, 5.0), (2.4, 10.0))
TRAINING_TEXT = (
    "a cat walks over the snow, a red boat on a green lake at sunset, slow camera, cinematic light",
    "blurry, low quality, distorted, still image, watermark",
)

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@dataclass(frozen=True)
class TinyWan:
    """Sizes of the checkpoint; the defaults make one of about 5 MB."""

    num_attention_heads: int = 2
    attention_head_dim: int = 64
    num_layers: int = 2
    ffn_dim: int = 256
    text_dim: int = 32
    freq_dim: int = 64
    latent_channels: int = 16
    vae_base_dim: int = 8
    vocabulary: int = 512
    flow_shift: float = 3.0


def build_tokenizer(sizes: TinyWan) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any prompt has tokens. Pads and ends as T5's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=sizes.vocabulary,
        special_tokens=["<pad>", "</s>", "<unk>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
    )


def build_transformer(sizes: TinyWan) -> torch.nn.Module:
    import torch
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=sizes.num_attention_heads,
        attention_head_dim=sizes.attention_head_dim,
        in_channels=sizes.latent_channels,
        out_channels=sizes.latent_channels,
        text_dim=sizes.text_dim,
        freq_dim=sizes.freq_dim,
        ffn_dim=sizes.ffn_dim,
        num_layers=sizes.num_layers,
        rope_max_seq_len=128,
    )
    with torch.no_grad():
        for index, block in enumerate(model.blocks):
            gains = torch.tensor(HEAD_GAINS[index % len(HEAD_GAINS)])
            per_head = gains.repeat(sizes.num_attention_heads)[: sizes.num_attention_heads]
            for norm in (block.attn1.norm_q, block.attn1.norm_k):
                norm.weight.mul_(per_head.repeat_interleave(sizes.attention_head_dim))
    return model


def build_text_encoder(sizes: TinyWan) -> torch.nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=sizes.vocabulary,
        d_model=sizes.text_dim,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    return UMT5EncoderModel(config)


def build_vae(sizes: TinyWan) -> torch.nn.Module:
    import torch
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(
        base_dim=sizes.vae_base_dim, z_dim=sizes.latent_channels, num_res_blocks=1, attn_scales=[]
    )
    with torch.no_grad():
        # Untrained, the decoder's output is a faint grey; this fills the range of a picture.
        vae.decoder.conv_out.weight.mul_(1.5)
    return vae


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary sibling of `target` that takes its name only when everything was written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield staging
        staging.chmod(0o755)
        staging.replace(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def write_checkpoint(target: Path, *, seed: int, two_experts: bool, sizes: TinyWan) -> None:
    """Write to the new or empty directory `target`; the same seed gives the same bytes."""
    import torch
    import transformers.utils.logging
    from diffusers import UniPCMultistepScheduler, WanPipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = {
            "transformer": build_transformer(sizes),
            "text_encoder": build_text_encoder(sizes),
            "vae": build_vae(sizes),
            "transformer_2": build_transformer(sizes) if two_experts else None,
        }
    pipeline = WanPipeline(
        tokenizer=build_tokenizer(sizes),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=sizes.flow_shift
        ),
        boundary_ratio=WAN_2_2_BOUNDARY_RATIO if two_experts else None,
        **parts,
    )
    transformers.utils.logging.disable_progress_bar()
    with new_directory(target) as staging:
        pipeline.save_pretrained(staging, safe_serialization=True)


@app.command()
def main(
    directory: Annotated[Path, typer.Argument(help="New or empty directory to write to.")],
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    two_experts: Annotated[
        bool, typer.Option("--two-experts", help="Like Wan 2.2: a second transformer takes over.")
    ] = False,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = TinyWan.num_layers,
) -> None:
    """Write a tiny, complete, randomly initialised Wan checkpoint in diffusers' format.

    Example: python scripts/make_tiny_checkpoint.py build/tiny-wan --seed 0
    """
    if layers < 1:
        raise UserError(f"--layers is {layers}; give 1 or more")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists and is not an empty directory; give a new one")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # diffusers imports torch_xla; nothing here runs on a device.
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    try:
        write_checkpoint(
            directory, seed=seed, two_experts=two_experts, sizes=TinyWan(num_layers=layers)
        )
    except OSError as error:
        raise UserError(
            f"cannot write {directory} ({error.strerror or error}); choose another"
        ) from error
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    console.print(f"wrote {directory} ({size / 2**20:.1f} MB)", soft_wrap=True)


if __name__ == "__main__":
    run(app)

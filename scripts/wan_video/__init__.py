"""The parts of `generate_wan.py`: request, checkpoint, denoising on PyTorch/XLA, outputs."""

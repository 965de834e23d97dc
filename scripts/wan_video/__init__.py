"""The parts of `generate_wan.py`: what is asked, loading, denoising on PyTorch/XLA, decoding, writing."""

"""Packaging of torch-clis; tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"

JAX = [
    # jax 0.7 needs Python 3.11; torch_xla 2.9 itself asks for jax 0.7.1.
    'jax>=0.7.1,<0.8; python_version >= "3.11"',
    'jaxlib>=0.7.1,<0.8; python_version >= "3.11"',
    'jax>=0.6.2,<0.7; python_version < "3.11"',
    'jaxlib>=0.6.2,<0.7; python_version < "3.11"',
]
XLA = [*JAX, "torch>=2.9,<2.10", "torch_xla>=2.9,<2.10"]
TPU = [
    *XLA,
    'libtpu>=0.0.21; python_version >= "3.11"',
    'libtpu==0.0.21; python_version < "3.11"',
]
PLOTS = ["matplotlib>=3.8"]
DIFFUSERS = [
    *XLA,
    'diffusers>=0.42.1,<0.43; python_version >= "3.11"',
    'diffusers>=0.41,<0.42; python_version < "3.11"',
    "transformers>=5.20,<6",
    "accelerate>=1.10",
    "ftfy>=6.2",
    "imageio>=2.34",
    "imageio-ffmpeg>=0.5",
    "pillow>=10",
    "sentencepiece>=0.2",
    *PLOTS,
]
TRAIN = [*XLA, "transformers>=5.20,<6", "accelerate>=1.10"]
DEV = [
    *DIFFUSERS,
    "hypothesis>=6.100",
    "mypy>=1.18",
    "pytest>=8.2",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.5",
    "python-flint>=0.7",
    "ruff>=0.12",
]

setup(
    name="torch-clis",
    version="0.1.0",
    description="Attention with a certified loop-invariant softmax stabilizer, for PyTorch/XLA",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(
        include=[
            "certify",
            "certify.*",
            "jax_kernels",
            "jax_kernels.*",
            "torch_clis",
            "torch_clis.*",
        ]
    ),
    package_data={
        "certify": ["py.typed"],
        "jax_kernels": ["py.typed", "tuned/*.json"],
        "torch_clis": ["py.typed"],
    },
    install_requires=["numpy>=1.26", "safetensors>=0.4.3", "typer>=0.12", "rich>=13.7"],
    extras_require={
        "jax": JAX,
        "xla": XLA,
        "tpu": TPU,
        "diffusers": DIFFUSERS,
        "train": TRAIN,
        "plots": PLOTS,
        "dev": DEV,
    },
    entry_points={
        "console_scripts": ["certify = certify.cli:main"],
        "certify.commands": ["record = torch_clis.record_command:record"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)

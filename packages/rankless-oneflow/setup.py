"""Settings that pyproject.toml cannot express: one file without a package, installed beside all packages."""

from setuptools import setup

setup(
    packages=["", "rankless_oneflow", "rankless_oneflow.optimizer"],
    package_dir={"": "source"},
    package_data={"": ["*.pth"], "rankless_oneflow": ["extension.toml"]},
    include_package_data=False,
)

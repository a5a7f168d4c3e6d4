"""Settings that pyproject.toml cannot express: one file without a package, installed beside all packages."""

from setuptools import setup

setup(packages=[""], package_dir={"": "source"}, package_data={"": ["*.pth"]}, include_package_data=False)

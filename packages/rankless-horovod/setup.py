"""What pyproject.toml cannot say: a package without a name, whose one file lands beside all packages."""

from setuptools import setup

setup(packages=[""], package_dir={"": "source"}, package_data={"": ["*.pth"]}, include_package_data=False)

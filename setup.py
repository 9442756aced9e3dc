"""What pyproject.toml cannot say: `configs/` is installed as `hf_dist/configs`, beside the packages that are found."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["hf_dist*"]), "hf_dist.configs"],
    package_dir={"hf_dist.configs": "configs"},
    package_data={"hf_dist": ["py.typed"], "hf_dist.configs": ["*.json", "README.md", "schema/*.json"]},
)

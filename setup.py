"""Package metadata, read from settings.ini."""
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup

here = Path(__file__).parent
config = ConfigParser(delimiters=["="])
config.read(here/"settings.ini", encoding="utf-8")
about = config["DEFAULT"]

extras = {key.removesuffix("_requirements"): about[key].split()
          for key in about if key.endswith("_requirements")}
extras["all"] = sorted({need for needs in extras.values() for need in needs})

setup(
    name=about["lib_name"],
    version=about["version"],
    description=about["description"],
    long_description=(here/"README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    keywords=about["keywords"],
    author=about["author"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    url=about["git_url"] or None,
    python_requires=f">={about['min_python']}",
    install_requires=about["requirements"].split(),
    extras_require=extras,
    packages=["tce_nb", "tce_nb.run", "tce_nb.report", "tce_nb.experiments"],
    package_dir={"tce_nb.experiments": "nbs/experiments"},
    package_data={"tce_nb": ["py.typed"],
                  "tce_nb.experiments": ["*.ipynb"]},
    entry_points={"console_scripts": ["tce=tce_nb.run.cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)

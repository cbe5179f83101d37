"""Where clients live: environments of their own, made once from exact versions, in a cache.

The folder of one is named by what it was made from, and appears when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

from surestep_common.config import cache_dir

HERE = Path(__file__).parent
CACHE = cache_dir() / "clients"
_CLAIM = re.compile(r"""(works|refused)\(\s*["']([^"']+)["']""")
_PIN = re.compile(r'^(?: *")?([\w@/.-]+)(?:==|": ")([\w.+-]+)', re.MULTILINE)
# No long attempts: without a network a client is left out, and nobody waits for it.
_PIP = ("install", "-q", "--no-deps", "--no-compile", "--retries", "2", "--timeout", "20")
_NPM = ("install", "--no-package-lock", "--no-audit", "--no-fund", "--fetch-retries=0")
INSTALL_S = 1200
_ON_TOP = "# over the packages of Surestep's own environment"


class CannotInstallError(Exception):
    """The packages of a client are not to be had; the text says why."""


class Client(NamedTuple):
    """A script that acts as a client's user."""

    name: str  # with_NAME.py, agents/with_NAME.py or node/with_NAME.mjs
    script: Path
    versions: Path  # exact versions of everything it needs

    @property
    def claims(self) -> dict[str, str]:
        """What the script says of each feature, in its order: works or refused."""
        text = self.script.read_text(encoding="utf-8")
        return {feature: outcome for outcome, feature in _CLAIM.findall(text)}

    @property
    def title(self) -> str:
        """First line of the script: the package, for people."""
        return self.script.read_text(encoding="utf-8").split("\n", 1)[0].strip('"/ .')

    @property
    def version(self) -> str:
        """The version of the package that the title names."""
        text = self.versions.read_text(encoding="utf-8")
        pins = dict(_PIN.findall(text.lower().replace("_", "-")))
        words = [word.strip(",()`").lower() for word in self.title.split()]
        return next((pins[word] for word in words if word in pins), "")

    @property
    def is_agent(self) -> bool:
        """Whether it is a program, which a script of Python starts."""
        return self.script.parent.name == "agents"

    @property
    def is_node(self) -> bool:
        """Whether its packages are Node's."""
        return self.versions.suffix == ".json"

    def command(self, environment: Path, scratch: Path) -> list[str]:
        """How the script is started, but for its arguments; `scratch` is an empty folder."""
        if self.script.suffix == ".py":
            python = sys.executable if self.is_agent else str(environment / "bin" / "python")
            folders = ["agents"] if self.is_agent else []
            return [python, "-m", "clients", ".".join([*folders, self.script.stem])]
        # Node looks for packages beside the script.
        folder = shutil.copytree(self.script.parent, scratch / "node")
        (folder / "node_modules").symlink_to(environment / "node_modules")
        return ["node", str(folder / self.script.name)]


def clients() -> tuple[Client, ...]:
    """All of them, by name."""
    python = [
        Client(name, script, HERE / "requirements" / f"{name}.txt")
        for script in HERE.glob("with_*.py")
        for name in [script.stem.removeprefix("with_")]
    ]
    node = [
        Client(script.stem.removeprefix("with_"), script, HERE / "node" / "package.json")
        for script in HERE.glob("node/with_*.mjs")
    ]
    agents = [
        Client(script.stem.removeprefix("with_"), script, HERE / "agents" / "package.json")
        for script in HERE.glob("agents/with_*.py")
    ]
    return tuple(sorted((*python, *node, *agents)))


def environment(client: Client, cache: Path = CACHE) -> Path:
    """The folder of a client's environment, which is made where it is not there yet.

    Raises:
        CannotInstallError: its packages are not to be had.
    """
    made_from = client.versions.read_bytes()
    if not client.is_node:
        made_from += sys.version.encode()
    if _is_on_top(client.versions):
        made_from += sys.prefix.encode()
    name = client.versions.parent.name if client.is_node else client.name
    folder = cache / f"{name}-{hashlib.sha256(made_from).hexdigest()[:12]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as scratch:
            install = _install_node if client.is_node else _install_python
            install(client.versions, Path(scratch) / "new")
            with contextlib.suppress(OSError):  # somebody else was as quick
                (Path(scratch) / "new").rename(folder)
    return folder


def _install_python(versions: Path, folder: Path) -> None:
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), *_PIP]
    _run([*pip, "-r", str(versions)], folder.parent)
    if _is_on_top(versions):
        # What the client has of its own comes first.
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "ours.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")


def _is_on_top(versions: Path) -> bool:
    """Whether a client uses packages of ours too, because they are large."""
    return versions.read_text(encoding="utf-8").startswith(_ON_TOP)


def _install_node(versions: Path, folder: Path) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise CannotInstallError("node is not installed")
    folder.mkdir()
    shutil.copy(versions, folder)
    _run(["npm", *_NPM], folder)


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=INSTALL_S
        )
    except subprocess.TimeoutExpired as error:
        raise CannotInstallError(f"not installed after {INSTALL_S} s") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise CannotInstallError(next((x for x in lines if "ERROR" in x.upper()), lines[-1])[:300])


def variables(home: Path, environment: Path) -> dict[str, str]:
    """Of a script: this folder's modules, no network but loopback, nothing of the developer's."""
    programs = f"{environment / 'node_modules' / '.bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    kept = {key: os.environ[key] for key in ("LANG", "TMPDIR") if key in os.environ}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    ours = {"PATH": programs, "PYTHONPATH": str(HERE.parent), "HOME": str(home)}
    return kept | offline | ours

"""Installs wheel and sdist in clean environments, once for each extra, and runs what it brings: `make packages`. Needs
a package index.

Extras that bring torch are resolved and not installed, unless --torch is given: a plain index may offer the CUDA build
of several GB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = "import dynamo_semkv.bus.publisher, dynamo_semkv.contracts.codec, worker_connector.disk.namespace_codec, graphs"
SMOKE = {
    "": CORE,
    "connector": f"{CORE}, worker_connector.requests.hints, worker_connector.donors.kv_events, "
    f"worker_connector.disk.block_file",
    "telemetry": "import dynamo_semkv.telemetry.tracing as t, dynamo_semkv.telemetry.connector_metrics, "
    "opentelemetry.sdk.trace",
    "router": "import dynamo_semkv.dashboard.server, dynamo_semkv.cli.status_view, dynamo_semkv.observe.metrics",
    "embeddings": "import onnxruntime, tokenizers, usearch.index, dynamo_semkv.evidence.embedding",
    "report": "import matplotlib",
    "local": "import torch, gguf, zmq, graphs.local.settings, worker_connector.reference_engine.engine.engine",
    "semblend": "import semblend, sentence_transformers",
    "peers": "import datasketch, dynamo_semkv.bench.side_by_side",
}
"""Extra -> what must be importable with it alone."""
BRING_TORCH = {"local", "semblend", "peers"}
TYPED = "from dynamo_semkv.contracts.codec import decode_report\nwrong: int = decode_report(b'')\n"


def run(*command: str | Path, cwd: Path) -> str:
    """The command's stdout. Ends the program with the command's output if it fails."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(
            f"failed ({done.returncode}): {' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def build(folder: Path) -> list[Path]:
    """Runs `python -m build` with a build backend of the index; returns the wheel and the sdist that it was built
    from."""
    builder = folder / "builder"
    run(sys.executable, "-m", "venv", builder, cwd=ROOT)
    run(builder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "build", cwd=ROOT)
    run(builder / "bin" / "python", "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return [wheel, sdist]


def check(artifact: Path, extra: str, place: Path, *, torch: bool) -> str:
    """Returns what was done: "installed" or "resolved". Ends the program with what failed."""
    target = f"{artifact}[{extra}]" if extra else str(artifact)
    python = place / "bin" / "python"
    run(sys.executable, "-m", "venv", place, cwd=ROOT)
    pip = (python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check")
    if extra in BRING_TORCH and not torch:
        run(*pip, "--dry-run", target, cwd=place)
        return "resolved"
    run(*pip, target, cwd=place)
    run(python, "-I", "-c", SMOKE[extra], cwd=place)
    if "ok, hash" not in run(place / "bin" / "dynamo_semkv", "check-config", cwd=place):
        sys.exit(f"{target}: the command does not work")
    run(python, "-m", "pip", "check", cwd=place)
    return "installed"


def check_types(wheel: Path, place: Path) -> None:
    """Checks py.typed: a program of somebody else is checked against our types, so a wrong one must be refused."""
    python = place / "bin" / "python"
    run(sys.executable, "-m", "venv", place, cwd=ROOT)
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=place)
    (place / "theirs.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--python-executable", str(python), "theirs.py"]
    output = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False).stdout
    if 'expression has type "MaterializationReport"' not in output:
        sys.exit(f"the wheel's types are not seen from outside:\n{output}")


def main() -> None:
    """Builds both artifacts and checks each with every extra that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", action="store_true", help="install the extras that bring torch as well")
    parser.add_argument("--extra", action="append", choices=sorted(SMOKE), help="these alone ('': none)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="semkv-packages-") as name:
        folder = Path(name)
        artifacts = build(folder)
        for artifact in artifacts:
            kind = "wheel" if artifact.suffix == ".whl" else "sdist"
            for extra in arguments.extra or SMOKE:
                began = time.monotonic()
                did = check(artifact, extra, folder / f"{kind}-{extra or 'core'}", torch=arguments.torch)
                print(f"{kind:<6} {extra or 'core':<11} {did} ({time.monotonic() - began:.0f} s)", flush=True)
        check_types(artifacts[0], folder / "types")
        print("wheel  py.typed    seen by mypy")


if __name__ == "__main__":
    main()

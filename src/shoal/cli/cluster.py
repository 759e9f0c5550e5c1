"""The verbs for clusters: one thin function each. Never imports torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli import output
from shoal.cli.options import JobFile

PANEL = "Other machines"


def register(app: typer.Typer) -> None:
    for verb in (join, manifest):
        app.command(rich_help_panel=PANEL)(verb)


def manifest(
    job: JobFile,
    kind: Annotated[str, typer.Option(help="rayjob (KubeRay) or jobset (JobSet).")] = "rayjob",
    image: Annotated[str, typer.Option(help="An image with Shoal and the job's directory.", show_default=False)] = "",
    directory: Annotated[str, typer.Option("--dir", help="Where the job's directory is in the image.")] = "/job",
    workers: Annotated[int | None, typer.Option(min=1, help="How many workers.", show_default=False)] = None,
    memory: Annotated[str, typer.Option(help="Of each worker: 512Mi, 4Gi.")] = "4Gi",
    gpus: Annotated[int, typer.Option(min=0, help="Of each worker.")] = 0,
    claim: Annotated[str, typer.Option(help="A volume claim that keeps runs.", show_default=False)] = "",
) -> None:
    """Print Kubernetes YAML that runs the job: shoal manifest job.yaml --image IMAGE | kubectl apply -f -"""
    from shoal.errors import error
    from shoal.jobs.remote.manifest import KINDS, PodSettings, make_manifest
    from shoal.spec.load import load_job
    from shoal.spec.yaml_document import write_value

    found = next((one for one in KINDS if one == kind), None)
    if found is None:
        raise error("SH609", f"there is no kind '{kind}'", where="--kind", fix=f"Allowed: {', '.join(KINDS)}.")
    if not image:
        raise error("SH609", "an image is needed", where="--image", fix="Give one with Shoal and the job's directory.")
    checked = load_job(job)
    settings = PodSettings(image, job.name, directory=directory, memory=memory, gpus=gpus, claim=claim)
    objects = make_manifest(checked, found, settings, workers=workers)
    print("---\n".join(write_value(one) for one in objects), end="")


def join(
    where: Annotated[str, typer.Argument(help="HOST:PORT, as `shoal run --listen` shows it.", show_default=False)],
    token: Annotated[
        str,
        typer.Option(envvar="SHOAL_TOKEN", help="Better by the environment: others see command lines."),
    ] = "",
    directory: Annotated[Path, typer.Option("--dir", help="Where the job's code and data lie here.")] = Path("."),
    workers: Annotated[int, typer.Option(help="How many workers this machine gives.")] = 1,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for a driver that is not there yet.")] = 0,
    tls: Annotated[Path | None, typer.Option(help="cert.pem, key.pem and ca.pem, if the job has network.tls.")] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", envvar="SHOAL_TRUST_CODE", help="Execute any code that the run names.")
    ] = False,
    allow: Annotated[
        str, typer.Option(envvar="SHOAL_ALLOW", help="Only code of these: model.py,package.module", show_default=False)
    ] = "",
) -> None:
    """Work for a run that another machine drives. Its job names code that runs here, with your rights."""
    from shoal.jobs.join import join, wait_for_driver
    from shoal.spec.trust import CodeTrust

    trust = CodeTrust.from_text(allow, everything=trust_code)
    wait_for_driver(where, token, tls_dir=tls, wait_s=wait)
    code = join(where, token, base_dir=directory, workers=workers, tls_dir=tls, trust=trust, show=output.print_lines)
    sys.exit(code)

"""Commands for users of the model: take it out of a run, and serve it."""

from typing import Annotated

import typer

from neurons.commands import enter


def export(
    target: Annotated[
        str, typer.Argument(metavar="DIR_OR_URL", help="Directory of a local subnet, or a run's public URL.")
    ],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Where the model goes; must be empty or new.")],
    epoch: Annotated[
        int | None, typer.Option("--epoch", metavar="N", help="What epoch N published; without it the newest.")
    ] = None,
) -> None:
    """Write a run's model as a Hugging Face directory.

    \b
    strata export localnet --out model
    strata export https://strata.example.org --out model

    Config, safetensors, tokenizer; every snapshot is checked against the record. A model with a bottleneck is a class of
    its own: AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True).
    """
    enter("export", target, out, epoch)

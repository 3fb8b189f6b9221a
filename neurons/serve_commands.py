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
    depth: Annotated[
        int | None,
        typer.Option("--depth", metavar="N", help="Only the lowest N stages, of a run whose stages predict apart."),
    ] = None,
) -> None:
    """Write a run's model as a Hugging Face directory.

    \b
    strata export localnet --out model
    strata export https://strata.example.org --out model

    Config, safetensors, tokenizer; every snapshot is checked against the record. A model with a bottleneck is a class of
    its own: AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True).
    """
    enter("export", target, out, epoch, depth)


def serve(  # noqa: PLR0913  # a flag each
    what: Annotated[
        str,
        typer.Argument(metavar="DIR|host|gateway", help="Model directory; or host, or gateway, to start one process."),
    ],
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR", help="Model directory, for host and gateway.")
    ] = None,
    num_hosts: Annotated[
        int | None, typer.Option("--num-hosts", metavar="N", help="Stage hosts to start here. Default: 1.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option("--stage", metavar="K/N", help="The stage this host holds, from 0, of N.")
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", metavar="HOST:PORT,...", help="Every stage host of the gateway, replicas included."),
    ] = None,
    listen_host: Annotated[
        str | None, typer.Option("--host", metavar="ADDRESS", help="Address to listen on. Default: 127.0.0.1.")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", metavar="PORT", help="Default: a free one.")] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Model id for clients.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", help="Cores of a host; 0: all.")] = None,
    cache_tokens: Annotated[
        int | None,
        typer.Option("--cache-tokens", metavar="N", help="Tokens that a host's caches hold. Default: 65536."),
    ] = None,
    max_context: Annotated[
        int | None, typer.Option("--max-context", metavar="N", help="Tokens of prompt and completion; 0: as trained.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", help="Longest completion. Default: 4096.")
    ] = None,
    max_running: Annotated[
        int | None, typer.Option("--max-running", metavar="N", help="Sequences under way at once. Default: 64.")
    ] = None,
    max_waiting: Annotated[
        int | None, typer.Option("--max-waiting", metavar="N", help="Sequences that may wait. Default: 256.")
    ] = None,
    request_s: Annotated[
        float | None, typer.Option("--request-time", metavar="SECONDS", help="For a whole completion. Default: 600.")
    ] = None,
    failover_s: Annotated[
        float | None,
        typer.Option("--failover-time", metavar="SECONDS", help="Wait for a lost stage's host. Default: 10."),
    ] = None,
    until_eof: Annotated[bool, typer.Option("--until-eof", help="Host: stop when the standard input ends.")] = False,
    log_level: Annotated[
        str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
    ] = None,
) -> None:
    """Serve a model with OpenAI's completions API.

    \b
    strata serve model --num-hosts 3                    three stage hosts and a gateway on this machine
    strata serve host --model model --stage 0/2 --port 9100
    strata serve host --model model --stage 1/2 --port 9101
    strata serve gateway --model model --hosts 127.0.0.1:9100,127.0.0.1:9101 --port 8000

    A directory of `strata export`, or any Llama of Hugging Face's layout, cut as it is read. Beyond loopback, hosts need
    STRATA_SERVE_KEY and a gateway STRATA_SERVE_API_KEY. See docs/serving.md.
    """
    given = {
        "model": what if what not in ("host", "gateway") else model,
        "num_hosts": num_hosts,
        "stage": stage,
        "hosts": None if hosts is None else [host for host in hosts.split(",") if host],
        "listen_host": listen_host,
        "port": port,
        "name": name,
        "num_threads": threads,
        "cache_tokens": cache_tokens,
        "max_context": max_context,
        "max_tokens": max_tokens,
        "max_running": max_running,
        "max_waiting": max_waiting,
        "request_s": request_s,
        "failover_s": failover_s,
        "until_eof": until_eof,
        "log_level": log_level,
    }
    enter("serve", what, {key: value for key, value in given.items() if value is not None})

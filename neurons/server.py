"""`strata serve`: stage hosts, the gateway in front of them, or both on this machine."""

import secrets

from neurons import settings
from neurons.lifecycle import Stop, run_role
from neurons.serving.options import ServeOptions, check_key, read_options
from subnet.adapters.model_files import ModelDirectory
from subnet.errors import InvalidConfig


def run_serve(what: str, given: dict[str, object]) -> int:
    """Run one process of serving to its end; returns the exit code. Raises InvalidConfig, StartupRefused.

    Each kind is imported here: a host does without the HTTP server and the chain's keys.
    """
    if "model" not in given:
        raise InvalidConfig(f"name the model's directory: strata serve {what} --model DIR")
    options = read_options(given)
    serve_key, api_key = settings.serve_keys()
    directory = ModelDirectory(settings.user_path(options.model))
    if what == "host":
        from neurons.serving.host_process import run_host

        check_key(options.listen_host, serve_key, settings.SERVE_KEY_VARIABLE)
        return run_role(
            lambda stop: run_host(directory, options, serve_key, stop), role="stage-host", log_level=options.log_level
        )
    check_key(options.listen_host, api_key, settings.API_KEY_VARIABLE)
    if what != "gateway":
        return run_role(
            lambda stop: _everything(directory, options, api_key, stop), role="gateway", log_level=options.log_level
        )
    if not options.hosts:
        raise InvalidConfig("name every stage host: strata serve gateway --model DIR --hosts HOST:PORT,HOST:PORT")
    from neurons.serving.gateway_process import run_gateway

    keys = (serve_key, api_key)
    return run_role(
        lambda stop: run_gateway(directory, options, options.endpoints, keys, stop),
        role="gateway",
        log_level=options.log_level,
    )


async def _everything(directory: ModelDirectory, options: ServeOptions, api_key: str, stop: Stop) -> None:
    """A host process for each stage, kept alive, and the gateway in this one; they know each other by a key drawn now."""
    from neurons.serving.children import local_hosts
    from neurons.serving.gateway_process import run_gateway

    directory.served.stages(0, options.num_hosts)  # refuse before anything starts
    serve_key = secrets.token_hex(32)
    async with local_hosts(options, serve_key) as endpoints:
        await run_gateway(directory, options, endpoints, (serve_key, api_key), stop)

"""python -m cookbook.serve --port N: the local engine as a service for the tinker SDK, OpenAI clients and our own `backend=tinker`."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from cookbook.core.errors import ConfigError, CookbookError


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cookbook.serve", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="port to listen on; 0 takes a free one and prints it")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address; other than loopback needs --api-keys (default %(default)s)"
    )
    parser.add_argument(
        "--state-dir", type=Path, default=Path("runs/serve"), help="checkpoints and database (default %(default)s)"
    )
    parser.add_argument(
        "--base-model",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="a base model to serve, by its own name or as NAME for a model, folder or hub id PATH; may be repeated (default tiny)",
    )
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="lines of tenant=key; without it whoever reaches the port is let in",
    )
    parser.add_argument("--max-sessions", type=int, default=64, help="open sessions of a tenant (default %(default)s)")
    parser.add_argument(
        "--max-queued", type=int, default=4096, help="operations of a tenant in the queue (default %(default)s)"
    )
    parser.add_argument(
        "--session-timeout", type=float, default=600, metavar="S", help="a silent session ends (default %(default)s)"
    )
    parser.add_argument("--max-body-mb", type=int, default=64, help="largest request (default %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default %(default)s)")
    parser.add_argument(
        "--dtype", default="auto", help="of base models: auto, float32 or bfloat16 (default %(default)s)"
    )
    parser.add_argument(
        "--token-budget",
        type=int,
        default=4096,
        help="padded tokens trained or prefilled at once (default %(default)s)",
    )
    return parser.parse_args(argv)


def base_models(entries: Sequence[str]) -> dict[str, str]:
    """`NAME` or `NAME=PATH` entries as a mapping from the clients' names to the backend's.

    Raises:
        ConfigError: an entry is malformed or repeated.
    """
    models: dict[str, str] = {}
    for entry in entries or ["tiny"]:
        name, equals, path = entry.partition("=")
        if not name or (equals and not path):
            raise ConfigError(f"--base-model {entry}: must be NAME or NAME=PATH")
        if name in models:
            raise ConfigError(f"--base-model {entry}: {name} is given twice")
        models[name] = path or name
    return models


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Exit status 0; 1 with one line on stderr where the server cannot start."""
    arguments = parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    access = logging.getLogger("cookbook.serve.access")
    access.setLevel(logging.INFO)
    access.propagate = False
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.addHandler(handler)
    try:
        _serve(arguments)
    except CookbookError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    try:
        from cookbook.serve.http.server import Server, Settings
    except ImportError as error:
        raise ConfigError(f"the server needs the extra `serve`: pip install -e '.[serve]' ({error})") from error
    models = base_models(arguments.base_model)
    if arguments.api_keys is None and not is_loopback(arguments.host):
        raise ConfigError(
            f"--host {arguments.host}: is not loopback, so the server needs --api-keys FILE (lines of tenant=key)"
        )
    for name in ("max_sessions", "max_queued", "session_timeout", "max_body_mb", "token_budget"):
        if not getattr(arguments, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be more than 0")
    settings = Settings(
        host=arguments.host,
        port=arguments.port,
        state_dir=arguments.state_dir,
        base_models=models,
        api_keys=arguments.api_keys,
        max_sessions=arguments.max_sessions,
        max_queued=arguments.max_queued,
        session_timeout_s=arguments.session_timeout,
        max_body_bytes=arguments.max_body_mb * 2**20,
        device=arguments.device,
        dtype=arguments.dtype,
        token_budget=arguments.token_budget,
    )
    server = Server.open(settings)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.run_until_stopped())


if __name__ == "__main__":
    sys.exit(main())

"""Session server on the local engine, for the tinker SDK, OpenAI clients and `backend=tinker`."""

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
    parser.add_argument("--port", type=int, required=True, help="port to listen on; 0 chooses a free one and prints it")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address; any but loopback needs --api-keys (default %(default)s)"
    )
    parser.add_argument(
        "--state-dir", type=Path, default=Path("runs/serve"), help="checkpoints and database (default %(default)s)"
    )
    parser.add_argument(
        "--base-model",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="base model to serve: a bundled model, folder or hub id, as itself or as NAME; repeatable (default tiny)",
    )
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="lines of tenant=key; without it no key is needed",
    )
    parser.add_argument("--max-sessions", type=int, default=64, help="open sessions per tenant (default %(default)s)")
    parser.add_argument(
        "--max-queued", type=int, default=4096, help="queued operations per tenant (default %(default)s)"
    )
    parser.add_argument(
        "--session-timeout",
        type=float,
        default=600,
        metavar="S",
        help="end a session after S seconds without a request (default %(default)s)",
    )
    parser.add_argument("--max-body-mb", type=int, default=64, help="largest request body (default %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default %(default)s)")
    parser.add_argument(
        "--dtype", default="auto", help="dtype of base models: auto, float32 or bfloat16 (default %(default)s)"
    )
    parser.add_argument(
        "--token-budget",
        type=int,
        default=4096,
        help="padded tokens per training or prefill batch (default %(default)s)",
    )
    return parser.parse_args(argv)


def base_models(entries: Sequence[str]) -> dict[str, str]:
    """A mapping from the clients' names of base models to the backend's, from entries `NAME` or `NAME=PATH`.

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
    """Serve until SIGINT or SIGTERM. Exit status 0; 1 with one line on stderr if the server cannot start."""
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
        from cookbook.serve.server import Server, Settings
    except ImportError as error:
        raise ConfigError(f"the server needs the extra `serve`: pip install -e '.[serve]' ({error})") from error
    models = base_models(arguments.base_model)
    if arguments.api_keys is None and not is_loopback(arguments.host):
        raise ConfigError(
            f"--host {arguments.host}: is not a loopback address; add --api-keys FILE (lines of tenant=key)"
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

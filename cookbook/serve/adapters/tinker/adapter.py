"""What the tinker adapter contributes to the application: routes, the shape of errors, the form of API keys."""

from __future__ import annotations

from cookbook.serve.adapters.tinker.paths import format_path
from cookbook.serve.adapters.tinker.routes import PREFIX, tinker_routes
from cookbook.serve.core.errors import ServiceError
from cookbook.serve.http.adapter import Adapter

KEY_PREFIX = "tml-"


def error_body(error: ServiceError) -> dict[str, str]:
    return {"detail": error.text(format_path)}


def key_problem(key: str) -> str | None:
    return None if key.startswith(KEY_PREFIX) else f"the key must begin with {KEY_PREFIX}, as the tinker SDK requires"


TINKER = Adapter(
    prefixes=(PREFIX,),
    routes=tinker_routes,
    error_body=error_body,
    key_advice="TINKER_API_KEY",
    key_problem=key_problem,
    health_paths=(f"{PREFIX}/healthz",),
)

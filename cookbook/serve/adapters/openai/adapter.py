"""What the OpenAI adapter contributes to the application: routes and the shape of errors."""

from __future__ import annotations

from typing import Any

from cookbook.serve.adapters.openai.routes import PREFIXES, openai_routes
from cookbook.serve.adapters.tinker.paths import format_path
from cookbook.serve.core.errors import ServiceError
from cookbook.serve.http.adapter import Adapter


def error_body(error: ServiceError) -> dict[str, Any]:
    kind = type(error).__name__
    return {"error": {"message": error.text(format_path), "type": kind, "code": kind, "param": None}}


OPENAI = Adapter(prefixes=PREFIXES, routes=openai_routes, error_body=error_body, key_advice="OPENAI_API_KEY")

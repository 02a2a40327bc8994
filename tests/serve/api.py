"""A client of the server's JSON endpoints, without an SDK."""

import json
import re
import urllib.error
import urllib.request
from typing import Any

ONE_LINE = re.compile(r"[^\n]{20,400}")


class Api:
    """A client of one server, with an API key if it has keys."""

    def __init__(self, url: str, key: str | None = None, base_model: str = "tiny") -> None:
        self.url, self.key, self.base_model = url, key, base_model

    def call(self, path: str, body: object = None, method: str | None = None, **headers: str) -> tuple[int, Any]:
        """The status and the JSON of the answer. A path that does not begin with / is below /api/v1."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        url = f"{self.url}{path}" if path.startswith("/") else f"{self.url}/api/v1/{path}"
        key = {} if self.key is None else {"X-API-Key": self.key}
        request = urllib.request.Request(
            url, data, {"Content-Type": "application/json", **key, **headers}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, _decode(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _decode(error.read())

    def ok(self, path: str, body: object = None) -> Any:
        status, answer = self.call(path, body)
        assert status == 200, answer
        return answer

    def refused(self, status: int, path: str, body: object = None, method: str | None = None, **headers: str) -> str:
        got, answer = self.call(path, body, method, **headers)
        assert got == status, answer
        return error_line(answer)

    def fetch(self, request_id: str) -> Any:
        """The result of an operation; asks until it is there."""
        while True:
            status, answer = self.call("retrieve_future", {"request_id": request_id})
            if status != 408:
                assert status == 200, answer
                return answer

    def result(self, path: str, body: object) -> Any:
        return self.fetch(self.ok(path, body)["request_id"])

    def failed(self, path: str, body: object) -> str:
        answer = self.result(path, body)
        assert ONE_LINE.fullmatch(answer["error"]), answer
        return answer["error"]

    def session(self) -> str:
        return self.ok("create_session", {})["session_id"]

    def model(self, session: str | None = None, number: int = 0) -> str:
        lora = {"rank": 4, "seed": 1}
        asked = {
            "session_id": session or self.session(),
            "model_seq_id": number,
            "base_model": self.base_model,
            "lora_config": lora,
        }
        return self.result("create_model", asked)["model_id"]


def error_line(answer: Any) -> str:
    """The message of an error body, which must be one line: `error.message` for OpenAI clients, `detail` for others."""
    message = answer["error"]["message"] if "error" in answer else answer["detail"]
    assert ONE_LINE.fullmatch(message), answer
    return message


def _decode(body: bytes) -> Any:
    try:
        return json.loads(body or b"null")
    except ValueError:
        return body.decode(errors="replace")

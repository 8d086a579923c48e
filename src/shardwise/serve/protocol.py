"""OpenAI's requests, as far as this server supports them.

A field that is unknown, or that would change the answer in a way that is not supported, is rejected by name: a response
that silently ignores part of the request is worse than an error. Fields that only label a request are accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from shardwise.nn.generate import Message, Sampling

StopString = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Whole = Annotated[int, Field(ge=1)]


class BadRequest(Exception):
    """A request that is answered with an error."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, wait: int | None = None
    ) -> None:
        super().__init__(message)
        param = None if param is None else param.encode("utf-8", "replace").decode()
        self.status = status
        self.param = param
        self.code = code
        self.wait = wait

    def body(self) -> dict[str, Any]:
        """Returns the error in OpenAI's form."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        message = str(self).encode("utf-8", "replace").decode()  # it may quote half a character of the request
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Strict):
    """A text part of a message; images and audio are not supported."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """A message; tool fields are passed to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = Field(default=None, validate_default=True)
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: None = None

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") not in ("assistant", None):  # an assistant may call tools instead
            raise PydanticCustomError("missing", "Field required")
        return content

    def plain(self) -> Message:
        """Returns the message for chat templates; `developer` is OpenAI's newer name for `system`."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        message: Message = {"role": "system" if self.role == "developer" else self.role, "content": content or ""}
        extra = {"name": self.name, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in extra.items() if value is not None}


class StreamOptions(_Strict):
    """What a stream holds besides text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ResponseFormat(_Strict):
    """Only text is supported."""

    type: Literal["text"]


class _Request(_Strict):
    model: str
    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Whole | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Of these, only the values that change nothing.
    frequency_penalty: Literal[0, None] = None
    presence_penalty: Literal[0, None] = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wanted(self) -> int | None:
        """The requested maximum length of the answer."""
        return self.max_tokens

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int, choice: int) -> Sampling:
        """Returns the sampling settings of one of the `n` answers; OpenAI's default temperature is 1."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=None if self.seed is None else (self.seed + choice) % 2**63,
            repetition_penalty=self.repetition_penalty,
        )


class ChatRequest(_Request):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None

    @property
    def wanted(self) -> int | None:
        """The requested maximum length; the newer field takes precedence."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def scores(self) -> int | None:
        """Number of top log-probabilities to return with each token; None for none."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TextRequest(_Request):
    """Body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1, None] = None
    suffix: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def scores(self) -> int | None:
        """Number of top log-probabilities to return with each token; None for none."""
        return self.logprobs


Request = TypeVar("Request", ChatRequest, TextRequest)


def parse(kind: type[Request], body: Any) -> Request:
    """Returns a request from its JSON; raises BadRequest with the first invalid field."""
    if not isinstance(body, dict):
        raise BadRequest(400, "the body is to be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # Where a field takes several kinds of values, the complaint that goes deepest is about the kind that was meant.
        same_field = [entry for entry in errors if entry["loc"][:1] == errors[0]["loc"][:1]]
        first = max(same_field, key=lambda entry: len(entry["loc"]))
        param = ".".join(str(part) for part in first["loc"] if _is_field(part))
        if first["type"] == "extra_forbidden":
            raise BadRequest(400, f"unknown field: {param}", param, "unknown_parameter") from None
        raise BadRequest(400, f"{param}: {first['msg']}", param, "invalid_value") from None


def _is_field(part: int | str) -> bool:
    """Whether a part of an error's path is a field or an index, not the branch of a union."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int", "float", "bool", "none"))

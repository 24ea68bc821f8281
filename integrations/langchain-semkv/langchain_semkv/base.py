"""What both LangChain classes share: their options, and what answers them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, Self

from langchain_core.language_models.base import BaseLanguageModel, LanguageModelOutputVar
from langchain_core.prompt_values import PromptValue
from langchain_core.utils import secret_from_env
from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from semkv_rag.config import ReuseOptions
from semkv_rag.errors import OptionError
from semkv_rag.llm import Backend, LocalBackend, RemoteBackend, shared_engine
from semkv_rag.llm.options import (
    ENGINE_FIELDS,
    PROMPT_CACHE_FIELDS,
    REUSE_FIELDS,
    check_options,
    reuse_options,
)
from semkv_rag.prompt_cache.named import encoder_names, plain_options

API_KEY_VARIABLE = "SEMKV_API_KEY"
INDEX_URL_VARIABLE = "SEMKV_INDEX_URL"


class SemKVModel(BaseLanguageModel[LanguageModelOutputVar], ABC):
    """The options of `ChatSemKV` and `SemKVLLM`, and the backend that answers.

    In this process with `model` and `store`: the engine is started at first use, and shared by all
    objects with the same model, store and arguments, LlamaIndex's too. With `engine`, one that runs
    already. With `base_url`, a server that was started with `semkv serve`.

    Raises:
        OptionError: at construction, when an option cannot be used; it is a `ValueError`.
        MissingExtraError, StoreError, EngineError: at first use, when there is no engine to be had.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    model: str | None = None
    """A folder or a hub name, as for vLLM; of a server, one of its models."""
    store: str | None = None
    """The store's folder; None answers as plain vLLM does."""
    index_url: SecretStr | None = None
    """The store's SQL index, when it is not in its folder. A secret: it may hold a password."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Fields of vLLM's `AsyncEngineArgs`."""
    chat_args: dict[str, Any] = Field(default_factory=dict)
    """Options of vLLM's chat, named as on its command line, such as `tool_call_parser`."""
    prompt_cache: dict[str, Any] | None = None
    """Reuse of whole prompts: a `PromptCacheOptions` or its fields, `{}` for the defaults."""
    encoders: dict[str, Any] = Field(default_factory=dict)
    """The tiers' encoders by layer: `minilm`, `phash`, a model's name, or an `Encoder`."""
    ram_bytes: int = Field(default=0, ge=0)
    """What stored chunks may take in memory, in bytes; 0 for none."""
    lora: str | None = None
    """The folder of a LoRA adapter that answers, in this process; documents are stored for it, too."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """A `semkv_rag.Engine` that runs already. Whoever started it closes it."""
    base_url: str | None = None
    """A server's address, up to and with `/v1`."""
    api_key: SecretStr | None = Field(
        default_factory=secret_from_env(API_KEY_VARIABLE, default=None)
    )
    """The server's key; from the environment's `SEMKV_API_KEY` when left out."""
    timeout: float = Field(default=60.0, gt=0)
    """The most seconds a server may take to answer."""
    max_retries: int = Field(default=2, ge=0)
    """How often a server that does not answer is asked again."""

    reuse: bool = True
    """False answers as plain vLLM does."""
    preset: str | None = None
    """`fast`, `balanced` or `exact`, for ratio, selector and check layer where these are not set."""
    ratio: float | Literal["auto"] | None = None
    """Recomputed reused tokens / reused tokens, 0 to 1; `auto`: as many as the preset's promise takes."""
    selector: str | None = None
    """The rule that picks the recomputed tokens."""
    check_layer: int | None = None
    """The layer whose KV deviation is compared."""
    question_tokens: int | None = None
    """How many tokens at the prompt's end are the question, for selectors that look at it."""
    token_map: bool | None = None
    """True: the report tells what became of each token, for `ReuseReport.to_html`."""
    namespace: str | None = None
    """The tenant whose chunks may be used."""

    max_tokens: int = Field(default=256, gt=0)
    """The most tokens of an answer."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end an answer where they appear."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Further fields of OpenAI's request or of vLLM's `SamplingParams`, such as `top_p`."""
    streaming: bool = False
    """Whether `invoke` streams too, for callbacks that want each token."""

    _remotes: dict[str | None, RemoteBackend] = PrivateAttr(default_factory=dict)
    _local: tuple[Any, LocalBackend] | None = PrivateAttr(default=None)

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise OptionError(_in_words(error)) from error

    @model_validator(mode="before")
    @classmethod
    def _take_engine(cls, values: Any) -> Any:
        """An engine brings its model; folders may be given as `Path`."""
        if isinstance(values, dict):
            if values.get("engine") is not None and values.get("model") is None:
                values = {**values, "model": values["engine"].model}
            for name in ("store", "lora"):
                if values.get(name) is not None:
                    values = {**values, name: str(values[name])}
        return values

    @field_validator("prompt_cache", mode="before")
    @classmethod
    def _plain_options(cls, given: Any) -> Any:
        return plain_options(given)

    @field_serializer("encoders")
    def _encoder_names(self, encoders: dict[str, Any]) -> dict[str, str]:
        return encoder_names(encoders)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.engine is not None:
            its_own = any(getattr(self, name) for name in ENGINE_FIELDS)
            if its_own or self.base_url or self.model != self.engine.model:
                raise OptionError("engine= has its model and store: give it alone")
        check_options(self)
        return self

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @property
    def lc_secrets(self) -> dict[str, str]:
        return {"api_key": API_KEY_VARIABLE, "index_url": INDEX_URL_VARIABLE}

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """What decides an answer, for LangChain's caches and traces."""
        names = {
            "model",
            "lora",
            "store",
            "base_url",
            "max_tokens",
            "temperature",
            "stop",
            "sampling",
        }
        return self.model_dump(include=names | {"reuse", *REUSE_FIELDS, *PROMPT_CACHE_FIELDS})

    def get_num_tokens(self, text: str) -> int:
        """How many tokens the model makes of a text. The first call starts the engine."""
        if self.custom_get_token_ids is not None:
            return len(self.custom_get_token_ids(text))
        return self.backend().count_tokens(text)

    def get_token_ids(self, text: str) -> list[int]:
        """The model's tokens of a text; a server tells only how many there are.

        Raises:
            OptionError: with `base_url`.
        """
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        if self.base_url is not None:
            raise OptionError("a server tells how many tokens, not which: use get_num_tokens")
        engine = self.engine or self._shared_engine(None)
        ids: list[int] = engine.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def backend(self, model: str | None = None) -> Backend:
        """What answers: this object's model, or the `model` a call names instead of it.

        The first call starts the engine or asks the server, which takes a while.

        Raises:
            OptionError: an engine that was given has one model, and it is not this one.
        """
        wanted = model or self.model
        if self.base_url is not None:
            if wanted not in self._remotes:
                key = None if self.api_key is None else self.api_key.get_secret_value()
                self._remotes[wanted] = RemoteBackend(
                    self.base_url, key, wanted, self.timeout, self.max_retries
                )
            return self._remotes[wanted]
        if self.engine is not None and wanted != self.engine.model:
            raise OptionError(f"engine= runs {self.engine.model}: it cannot answer as {wanted}")
        engine = self.engine or self._shared_engine(model)
        if self._local is None or self._local[0] is not engine:
            self._local = engine, LocalBackend(engine, self.lora)
        return self._local[1]

    @abstractmethod
    def prefix_of(self, prompt: PromptValue, marker: str) -> str:
        """What the model sees of a prompt before a text in it; empty where the text is not in it."""

    def running_backend(self) -> Backend | None:
        """The engine in this process that answered last, if any did."""
        return None if self._local is None else self._local[1]

    def _shared_engine(self, model: str | None) -> Any:
        name = model or self.model
        assert name is not None  # _check_options
        return shared_engine(
            name,
            self.store,
            None if self.index_url is None else self.index_url.get_secret_value(),
            self.engine_args,
            self.chat_args,
            self.prompt_cache,
            self.encoders,
            self.ram_bytes,
            self.lora,
        )

    def _call(
        self, stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> tuple[Backend, dict[str, Any], dict[str, Any]]:
        """What answers a call, its fields and its reuse options: this object's under the call's."""
        reuse = self._reuse_options(kwargs)
        ReuseOptions.from_mapping(reuse)
        ends = self.stop if stop is None else stop
        own = ("model", "reuse", "stream", *REUSE_FIELDS)
        fields = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            **({"stop": ends} if ends else {}),
            **self.sampling,
            **{name: value for name, value in kwargs.items() if name not in own},
        }
        return self.backend(kwargs.get("model")), fields, reuse

    def _reuse_options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Those that were set; the others are the engine's or the server's to choose."""
        return reuse_options(self, kwargs)


def _in_words(error: ValidationError) -> str:
    faults = []
    for fault in error.errors():
        place = ".".join(map(str, fault["loc"]))
        message = fault["msg"].removeprefix("Value error, ")
        faults.append(f"{place}: {message}" if place else message)
    return "; ".join(faults)

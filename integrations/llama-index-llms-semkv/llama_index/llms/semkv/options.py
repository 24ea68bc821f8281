"""The options of `SemKV`, checked, and the engine or server that they name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llama_index.core.bridge.pydantic import (
    Field,
    PrivateAttr,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.llms.semkv.structured import StructuredPrediction

from semkv_rag.config import ReuseOptions
from semkv_rag.errors import OptionError
from semkv_rag.llm import (
    Backend,
    LocalBackend,
    RemoteBackend,
    shared_engine,
)
from semkv_rag.llm.options import ENGINE_FIELDS, REUSE_FIELDS, check_options, reuse_options
from semkv_rag.prompt_cache.named import encoder_names, plain_options

if TYPE_CHECKING:
    from semkv_rag.engine import Engine


class SemKVOptions(StructuredPrediction):
    """See `SemKV`."""

    model: str | None = Field(
        default=None,
        description="A folder or a hub name, as for vLLM; of a server, one of its models.",
    )
    store: str | None = Field(
        default=None, description="The store's folder; None answers as plain vLLM does."
    )
    index_url: str | None = Field(
        default=None,
        description="The store's SQL index, when it is not in its folder. May hold a password.",
        exclude=True,
        repr=False,
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further options of `semkv_rag.Engine`, and fields of vLLM's AsyncEngineArgs.",
    )
    chat_args: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM's chat options, such as tool_call_parser, as on its command line.",
    )
    prompt_cache: dict[str, Any] | None = Field(
        default=None,
        description="Reuse of whole prompts: a PromptCacheOptions or its fields; None for not at all.",
    )
    encoders: dict[str, Any] = Field(
        default_factory=dict,
        description="The tiers' encoders by layer: minilm, phash, a model's name, or an Encoder.",
    )
    ram_bytes: int = Field(
        default=0,
        ge=0,
        description="What stored chunks may take in memory, in bytes; 0 for none.",
    )
    lora: str | None = Field(
        default=None,
        description="The folder of a LoRA adapter that answers, in this process; documents are stored for"
        " it, too.",
    )
    base_url: str | None = Field(
        default=None, description="A server's address, up to and with /v1."
    )
    api_key: str | None = Field(
        default=None, description="The server's key.", exclude=True, repr=False
    )
    timeout: float = Field(
        default=60.0, gt=0, description="The most seconds a server may take to answer."
    )
    reuse: bool = Field(default=True, description="False answers as plain vLLM does.")
    preset: str | None = Field(
        default=None,
        description="fast, balanced or exact: ratio, selector and check layer where they are not set.",
    )
    ratio: float | Literal["auto"] | None = Field(
        default=None,
        description="Recomputed reused tokens / reused tokens, 0 to 1; auto: as many as the preset's "
        "promise takes.",
    )
    selector: str | None = Field(
        default=None, description="The rule that picks the recomputed tokens."
    )
    check_layer: int | None = Field(
        default=None, description="The layer whose KV deviation is compared."
    )
    question_tokens: int | None = Field(
        default=None,
        description="Tokens of the question at the prompt's end, for selectors that look at it.",
    )
    token_map: bool | None = Field(
        default=None,
        description="True: the report tells what became of each token, for ReuseReport.to_html.",
    )
    namespace: str | None = Field(default=None, description="The tenant whose chunks may be used.")
    max_tokens: int = Field(
        default=DEFAULT_NUM_OUTPUTS, gt=0, description="The most tokens of an answer."
    )
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    stop: list[str] = Field(
        default_factory=list, description="Texts that end an answer where they appear."
    )
    sampling: dict[str, Any] = Field(
        default_factory=dict, description="Further fields of vLLM's SamplingParams."
    )
    is_chat_model: bool | None = Field(
        default=None, description="None: when the model has a chat template."
    )

    _engine: Engine | None = PrivateAttr(default=None)
    _remote: RemoteBackend | None = PrivateAttr(default=None)
    _local: tuple[Engine, LocalBackend] | None = PrivateAttr(default=None)

    def __init__(
        self,
        model: str | None = None,
        store: str | Path | None = None,
        *,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        """See the class's fields for the options; `engine` is an `Engine` that runs already."""
        if engine is not None:
            if model or store or not options.keys().isdisjoint((*ENGINE_FIELDS, "base_url")):
                raise OptionError("engine= has its model and store: give it alone")
            model = engine.model
        if options.get("lora") is not None:
            options["lora"] = str(options["lora"])
        _refuse_unknown(options, type(self).model_fields)
        try:
            super().__init__(
                **{"model": model, "store": None if store is None else str(store), **options}
            )
        except ValidationError as error:
            raise OptionError(_in_words(error)) from error
        self._engine = engine
        if self.base_url is not None:
            self._remote = RemoteBackend(self.base_url, self.api_key, self.model, self.timeout)

    @field_validator("prompt_cache", mode="before")
    @classmethod
    def _plain_options(cls, given: Any) -> Any:
        return plain_options(given)

    @field_serializer("encoders")
    def _encoder_names(self, encoders: dict[str, Any]) -> dict[str, str]:
        return encoder_names(encoders)

    @model_validator(mode="after")
    def _check_options(self) -> SemKVOptions:
        check_options(self)
        return self

    def backend(self) -> Backend:
        """What answers, and precomputes. The first call starts the engine, which takes a while."""
        if self._remote is not None:
            return self._remote
        engine = self._engine
        if engine is None:
            assert self.model is not None  # _check_options
            engine = shared_engine(
                self.model,
                self.store,
                self.index_url,
                self.engine_args,
                self.chat_args,
                self.prompt_cache,
                self.encoders,
                self.ram_bytes,
                self.lora,
            )
        local = self._local
        if local is None or local[0] is not engine:  # the shared ones may have been closed
            local = self._local = (engine, LocalBackend(engine, self.lora))
        return local[1]

    def _options(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sampling parameters and reuse options: this object's with a call's over them."""
        reuse = self._reuse_options(kwargs)
        ReuseOptions.from_mapping(reuse)
        sampling = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            **({"stop": self.stop} if self.stop else {}),
            **self.sampling,
            **{key: value for key, value in kwargs.items() if key not in ("reuse", *REUSE_FIELDS)},
        }
        return sampling, reuse

    def _reuse_options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Those that were set; the others are the engine's or the server's to choose."""
        return reuse_options(self, kwargs)


def _refuse_unknown(options: Iterable[str], known: Collection[str]) -> None:
    """Not `extra="forbid"`: LlamaIndex's own fields and its `from_dict` build on what is passed over."""
    for name in options:
        if name not in known:
            meant = difflib.get_close_matches(name, known, 1, cutoff=0.7)
            advice = f"did you mean {meant[0]}?" if meant else "sampling= takes fields of vLLM's"
            raise OptionError(f"SemKV has no option {name!r}: {advice}")


def _in_words(error: ValidationError) -> str:
    faults = []
    for fault in error.errors():
        place = ".".join(map(str, fault["loc"]))
        message = fault["msg"].removeprefix("Value error, ")
        faults.append(f"{place}: {message}" if place else message)
    return "; ".join(faults)

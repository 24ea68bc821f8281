"""`SemKVPrecompute`: a step of an ingestion that stores the documents' KV."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.prompts import BasePromptTemplate, format_document

from langchain_semkv.base import SemKVModel
from semkv_rag.corpus import DEFAULT_CONTEXT, ContextMode, PrecomputeResult
from semkv_rag.corpus.context import context_modes
from semkv_rag.errors import OptionError

_MARKER = "THE RETRIEVED DOCUMENTS"

logger = logging.getLogger(__name__)


class SemKVPrecompute(BaseDocumentTransformer):
    """Stores the KV of documents as they pass, and passes them on as they are.

    Put it behind the splitter: what is stored is each document's text as the model will see it. What
    is in the store already costs nothing.

    Documents of one source (`metadata[source_key]`) are one source of the store, as they come in one
    call: of a changed source just the new ones are computed, and those it no longer has are removed.
    Give a source's documents in one call, therefore. A document without a source stands for itself.

    Args:
        llm: whose model computes them, into its store.
        prefix: the text every prompt will start with, such as a system prompt as the chat template
            writes it; see semkv-rag's `docs/precompute.md`.
        prompt: the chain's prompt: the prompt prefix is what the model sees of it before the
            documents.
        document_variable: the name in `prompt` of what the documents are put in for.
        context: what stands to a chunk's left while it is computed, a variant of it for each:
            `prefix`, or `left` (the document before it of the same source); see the same page.
        document_prompt: how the chain writes a document into its prompt, when it writes more than
            its text: the `document_prompt` of `create_stuff_documents_chain`.
        source_key: the metadata's key that names a document's source.
        namespace: the tenant the documents belong to; the one `llm` has, when left out.

    Attributes:
        result: the counts and failures of the last call. A document that could not be stored stops
            nothing: it is computed with each question, as without a store.
    """

    def __init__(
        self,
        llm: SemKVModel[Any],
        *,
        prefix: str | None = None,
        prompt: BasePromptTemplate[Any] | None = None,
        document_variable: str = "context",
        context: Sequence[ContextMode] = DEFAULT_CONTEXT,
        document_prompt: BasePromptTemplate[str] | None = None,
        source_key: str = "source",
        namespace: str | None = None,
    ) -> None:
        if prefix is not None and prompt is not None:
            raise OptionError("give the prompt prefix, or the prompt that it is found in, not both")
        if prompt is not None and document_variable not in prompt.input_variables:
            raise OptionError(
                f"the prompt has no {{{document_variable}}}: say by document_variable where the"
                f" documents are put in; it has {', '.join(prompt.input_variables)}"
            )
        self._llm = llm
        self._prefix = prefix
        self._prompt = prompt
        self._document_variable = document_variable
        self._context = context_modes(context)
        self._document_prompt = document_prompt
        self._source_key = source_key
        self._namespace = namespace
        self.result: PrecomputeResult | None = None

    def transform_documents(
        self, documents: Sequence[Document], **kwargs: Any
    ) -> Sequence[Document]:
        """Store the documents' KV; returns them unchanged.

        Raises:
            OptionError: the model has no store.
            EngineError: the engine or the server does not answer.
        """
        sources: dict[str, list[str]] = {}
        for document in documents:
            text = as_prompted(document, self._document_prompt)
            sources.setdefault(self._source(document, text), []).append(text)
        if self._prefix is None:
            self._prefix = self._found_prefix()
        self.result = store(
            self._llm,
            sources,
            namespace=self._namespace,
            prefix=self._prefix,
            context=self._context,
        )
        return documents

    def _found_prefix(self) -> str:
        if self._prompt is None:
            return ""
        filled = dict.fromkeys(self._prompt.input_variables, "")
        # Messages of an earlier conversation come between; without them the prefix ends before.
        for name, kind in self._prompt.input_types.items():
            if "list" in str(kind).lower():
                filled[name] = []  # type: ignore[assignment]
        filled[self._document_variable] = _MARKER
        return self._llm.prefix_of(self._prompt.invoke(filled), _MARKER)

    def _source(self, document: Document, text: str) -> str:
        named = document.metadata.get(self._source_key) or document.id
        return str(named) if named else sha256(text.encode()).hexdigest()


def as_prompted(document: Document, prompt: BasePromptTemplate[str] | None) -> str:
    """A document's text as it stands in a chain's prompt."""
    return document.page_content if prompt is None else format_document(document, prompt)


def store(
    llm: SemKVModel[Any],
    sources: Mapping[str, Sequence[str]],
    *,
    namespace: str | None,
    prefix: str,
    context: Sequence[ContextMode],
) -> PrecomputeResult:
    """Store sources, given as name and texts; what failed is logged, too."""
    result = llm.backend().store_texts(
        list(sources.items()), namespace=namespace or llm.namespace, prefix=prefix, context=context
    )
    for failure in result.failures:
        logger.warning("the KV of %s is not stored: %s", failure.source, failure.reason)
    return result

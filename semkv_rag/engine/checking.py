"""What an engine tells of its model and of itself: how likely an answer is, and what its workers find."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from vllm.lora.request import LoRARequest

from semkv_rag.config import ReuseOptions
from semkv_rag.connector.messages import GateReport
from semkv_rag.engine.client import ReportingLLM
from semkv_rag.engine.loop import EngineLoop
from semkv_rag.engine.scoring import Scored, score
from semkv_rag.errors import EngineError, SemKVError
from semkv_rag.wire import PARAMS_KEY


class Checking:
    """The part of `Engine` by which answers and machines are compared.

    Attributes:
        reuse: the options of requests that bring none.
        gate: whether this model is served with reuse, and if not, why.
    """

    reuse: ReuseOptions
    gate: GateReport
    _loop: EngineLoop

    @abstractmethod
    def _running(self) -> ReportingLLM: ...

    @abstractmethod
    def _request_id(self) -> str: ...

    def score(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        *,
        top: int = 20,
        reuse: ReuseOptions | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[Scored | None]:
        """What the model would have said in the place of each token of a given answer.

        The prompt's KV is that of `generate` with the same options: teacher forcing, for comparing
        ways to get it.

        Args:
            prompt, answer: tokens, at least one each.
            top: of how many of the likeliest tokens.
            reuse: this request's options instead of the engine's.
            lora_request: as for `Engine.generate`.

        Returns:
            For each token of the answer the log-probabilities in its place by token id: of the `top`
            likeliest, and of itself. None where vLLM's prefix cache held what was to be computed.

        Raises:
            OptionError: an option or the length cannot be used.
            EngineError: the engine stopped.
        """
        wishes = {PARAMS_KEY: (reuse or self.reuse).to_mapping()}
        return self._loop.call(
            score(self._running(), self._request_id(), prompt, answer, top, wishes, lora_request)
        )

    def reset_prefix_cache(self) -> bool:
        """Empty vLLM's prefix cache (L0); False when a request under way holds part of it."""
        return bool(self._loop.call(self._running().reset_prefix_cache()))

    def probe(self, name: str, size: int = 0) -> list[dict[str, Any]]:
        """What the workers find when they check themselves, by rank. No request may run meanwhile.

        vLLM's prefix cache is empty behind it, as the checks write over blocks.

        Args:
            name: `about`, `layout`, `attention` or `copying`.
            size: blocks for `layout` and `copying`, runs of rows for `attention`.

        Raises:
            EngineError: a worker failed, or the model is not served with reuse.
        """
        if not self.gate.servable:
            raise EngineError(f"nothing to check: {self.gate.reason}")
        try:
            asked = self._running().collective_rpc("semkv_probe", args=(name, size))
            return list(self._loop.call(asked))
        except SemKVError:
            raise
        except Exception as error:
            raise EngineError(f"the check {name} failed: {error}") from error
        finally:
            self.reset_prefix_cache()

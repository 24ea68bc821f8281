"""Agreement with full prefill on a user's own questions, and which options to set.

```python
from semkv_rag import Engine
from semkv_rag.quality import measure, read_questions

with Engine("Qwen/Qwen3-8B", store="kv/") as engine:
    result = measure(engine, read_questions("questions.jsonl"))
print(result.recommendation)
```

`semkv quality` does it on the command line.
"""

from semkv_rag.quality.measuring import measure
from semkv_rag.quality.prompts import Template
from semkv_rag.quality.questions import Passage, Question, read_questions
from semkv_rag.quality.recommending import TARGET
from semkv_rag.quality.result import Line, QualityResult, Recommendation
from semkv_rag.quality.settings import Setting, grid

__all__ = [
    "TARGET",
    "Line",
    "Passage",
    "QualityResult",
    "Question",
    "Recommendation",
    "Setting",
    "Template",
    "grid",
    "measure",
    "read_questions",
]

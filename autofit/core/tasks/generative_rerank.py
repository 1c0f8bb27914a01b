"""generative-rerank: to tell how well a passage answers a query by what the model would say next, yes or no.

The score is how much more likely one word is than another one at the end of the text (Qwen3-Reranker,
arXiv:2506.05176, section 2). No files are read: which words these are, a tokenizer says.
"""

from autofit.core.task import Task

GENERATIVE_RERANK = Task(
    name="generative-rerank",
    medium="text",
    labels="relevance in words",
    auto_classes=("AutoModelForCausalLM",),
    peft_type="CAUSAL_LM",
    tools={"msswift": {"task_type": "generative_reranker", "loss_type": "pointwise_reranker"}},
    loss_keys={
        "msswift": {
            "kind": {
                "pointwise": {"loss_type": "pointwise_reranker"},
                "listwise": {"loss_type": "listwise_reranker"},
            }
        }
    },
)

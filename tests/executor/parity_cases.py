"""The parity table, by number of processes."""

from tests.executor.cases import FULL, KEPT, MIXED, SELECTIVE, Case

DP = dict(dp_shard=2)
TWO = [
    Case(name="gpt2 fsdp", model="gpt2", mesh=DP),
    Case(name="llama fsdp kept", model="llama", mesh=DP, choices=(KEPT,), num_micro_batches=3),
    Case(name="llama replicate", model="llama", mesh=dict(dp_replicate=2)),
    Case(name="qwen2 fsdp each", model="qwen2", mesh=DP, sync="each_micro_batch"),
    Case(name="llama replicate each", model="llama", mesh=dict(dp_replicate=2),
         sync="each_micro_batch"),
    Case(name="gpt2 fsdp mixed", model="gpt2", mesh=DP, choices=MIXED),
    Case(name="mixtral fsdp", model="mixtral", mesh=DP, choices=(SELECTIVE,)),
    Case(name="bert fsdp", model="bert", mesh=DP),
    Case(name="vit fsdp", model="vit", mesh=DP, choices=(FULL,)),
    Case(name="t5 fsdp", model="t5", mesh=DP),
    Case(name="mlp fsdp", model="mlp", mesh=DP),
    Case(name="skipnet replicate", model="skipnet", mesh=dict(dp_replicate=2)),
    Case(name="llama tp", model="llama", mesh=dict(tp=2)),
    Case(name="qwen2 tp recompute", model="qwen2", mesh=dict(tp=2), choices=MIXED),
    Case(name="gpt2 tp", model="gpt2", mesh=dict(tp=2), choices=(FULL, SELECTIVE)),
    Case(name="mixtral tp", model="mixtral", mesh=dict(tp=2)),
    Case(name="bert tp", model="bert", mesh=dict(tp=2)),
    Case(name="llama tp whole", model="llama", mesh=dict(tp=2), whole=(1, 3, 6)),
    Case(name="gpt2 pp 1f1b", model="gpt2", mesh=dict(pp=2), num_micro_batches=3),
    Case(name="llama pp gpipe", model="llama", mesh=dict(pp=2), schedule="gpipe", cuts=(2,)),
    Case(name="qwen2 pp interleaved", model="qwen2", mesh=dict(pp=2), schedule="interleaved",
         chunks=2, num_micro_batches=4),
    Case(name="mixtral pp", model="mixtral", mesh=dict(pp=2)),
    Case(name="bert pp", model="bert", mesh=dict(pp=2), choices=MIXED),
    Case(name="vit pp", model="vit", mesh=dict(pp=2), choices=(SELECTIVE,)),
    Case(name="t5 pp", model="t5", mesh=dict(pp=2)),
    Case(name="mlp pp", model="mlp", mesh=dict(pp=2)),
    Case(name="mlp pp frozen stage", model="mlp", mesh=dict(pp=2), cuts=(2,)),
    Case(name="skipnet pp", model="skipnet", mesh=dict(pp=2), micro_batch=2),
    Case(name="gpt2 pp interleaved tied", model="gpt2", mesh=dict(pp=2), schedule="interleaved",
         chunks=2),
]

"""Kernels that compute and communicate at once, for Hopper GPUs of one process (Pallas, Mosaic GPU).

What order cannot hide, since nothing independent is left to hide it behind, one kernel can: it sends each tile where
it belongs as soon as it is computed, while its other blocks compute. That is the fused operator of Punniyamurthy et
al., "Optimizing Distributed ML Communication with Fused Computation-Collective Operations" (section III), and the
fused collective of CoCoNet (Jangda et al., sections 2.3, 3.4, 5.3).

| kernel | module | after |
| --- | --- | --- |
| all-gather + matmul | `gather_matmul` | JAX's own kernel, called; CoCoNet's overlap |
| matmul + reduce-scatter, + all-reduce, + all-to-all | `reduce_matmul` | Punniyamurthy et al., III-B |
| matrix × vector + all-reduce | `matvec` | the same, figure 7 |
| embedding bag + all-to-all | `embedding` | the same, section III-A |
| all-reduce + bias + residual + RMS norm | `norm` | CoCoNet, section 3.4 |
| reduce-scatter + Adam, + LAMB, + any update + all-gather | `adam`, `lamb`, `update` | CoCoNet, sections 3.4 and 4 |

Each takes this device's arrays under `jax.shard_map`, has its tuning range beside it as data, and a reference of
`lax` operations with the same signature. None uses multicast or NVSHMEM: a GPU reads and writes the memory of another
through `plgpu.remote_ref`, which XLA arranges within one process.

`catalog` has them side by side; `pattern` finds where an early module multiplies and communicates so that one of them
could do both, `update_pattern` where it updates; `times` says whether that pays; `fuse` puts a kernel there, as a
structural move of a plan (`docs/structure.md`), lowered by `lowering`.
"""

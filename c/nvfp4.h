#ifndef NVFP4_H
#define NVFP4_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Number of bytes at the start of packed weights that `nvfp4_moe_check_packed` reads.
#define NVFP4_MOE_HEAD_BYTES 48

// Number of bytes at the start of a linear layer's packed weights that `nvfp4_linear_check_packed` reads.
#define NVFP4_LINEAR_HEAD_BYTES 8

// Result of a function.
typedef enum nvfp4_status {
  // The work is done or queued.
  NVFP4_STATUS_OK = 0,
  // An argument is wrong.
  NVFP4_STATUS_INVALID = 1,
  // The device does not exist, failed, or has no kernel for the layer.
  NVFP4_STATUS_DEVICE = 2,
  // A bug in the library.
  NVFP4_STATUS_BUG = 3,
} nvfp4_status;

// Type of tokens and of a layer's output.
typedef enum nvfp4_dtype {
  // IEEE binary16.
  NVFP4_DTYPE_F16 = 0,
  // bfloat16.
  NVFP4_DTYPE_BF16 = 1,
} nvfp4_dtype;

// Type of logits.
typedef enum nvfp4_logit_type {
  // IEEE binary16.
  NVFP4_LOGIT_TYPE_F16 = 0,
  // bfloat16.
  NVFP4_LOGIT_TYPE_BF16 = 1,
  // IEEE binary32.
  NVFP4_LOGIT_TYPE_F32 = 2,
} nvfp4_logit_type;

// How a router selects experts and computes their weights. Among equal experts the lower index comes first.
typedef enum nvfp4_scoring {
  // Softmax over all experts, then the k largest.
  NVFP4_SCORING_SOFTMAX = 0,
  // The k largest logits, then softmax over them.
  NVFP4_SCORING_TOP_K_SOFTMAX = 1,
  // The largest logit; its sigmoid is a weight for the layer's input; k = 1.
  NVFP4_SCORING_SIGMOID_TOP1 = 2,
  // Experts by sigmoid + bias, from the groups with the largest sum of their two best experts; weights are sigmoids
  // without bias.
  NVFP4_SCORING_SIGMOID_GROUPS = 3,
  // Any rule with softmax over all experts as score. The three rules use every field of `nvfp4_router`.
  NVFP4_SCORING_RULE_SOFTMAX = 4,
  // Any rule with the sigmoid as score.
  NVFP4_SCORING_RULE_SIGMOID = 5,
  // Any rule with the square root of softplus as score (DeepSeek-V4).
  NVFP4_SCORING_RULE_SQRT_SOFTPLUS = 6,
} nvfp4_scoring;

// Format in which a layer multiplies its tokens and, in an MoE layer, the intermediate.
typedef enum nvfp4_token_format {
  // 16 bits, unchanged.
  NVFP4_TOKEN_FORMAT_BITS16 = 0,
  // FP8 (e4m3) with one scale per token; weights are rounded to e4m3. Faster on Hopper for many tokens, less
  // accurate.
  NVFP4_TOKEN_FORMAT_FP8 = 1,
  // NVFP4 with input scales or one global scale per token; weights are unchanged. Among GPUs, only Blackwell
  // supports it.
  NVFP4_TOKEN_FORMAT_NVFP4 = 2,
} nvfp4_token_format;

// A GPU with its kernels loaded. Several threads may use it at once.
typedef struct nvfp4_device nvfp4_device;

// A linear layer prepared for the CPU. Several threads may run calls at once.
typedef struct nvfp4_linear_cpu nvfp4_linear_cpu;

// An MoE layer prepared for the CPU. Several threads may run calls at once.
typedef struct nvfp4_moe_cpu nvfp4_moe_cpu;

// Sizes of an MoE layer. Zero fields mean the most common layer: SiLU, no shared expert, no biases, 16-bit tokens
// without input scales.
typedef struct nvfp4_moe_sizes {
  // H, elements of a token: a multiple of 16.
  size_t hidden;
  // I, rows of gate and up: a multiple of 16.
  size_t intermediate;
  // E, experts in the layer: 1 to 1024.
  size_t experts;
  // Number of experts that a token can name: the length of the expert map, or E.
  size_t named_experts;
  // k, experts per token: 1 to 32.
  size_t top_k;
  // I of the expert that every token uses; 0 if there is none.
  size_t shared_intermediate;
  // An `nvfp4_dtype`: the token type.
  uint32_t dtype;
  // The activation as a word with its numbers, such as "silu", "gelu-tanh", "gpt-oss" or "situ=8,4"; null for "silu".
  // The documentation of `Activation` in the crate `nvfp4` lists the words.
  const char *activation;
  // Whether projections have biases.
  bool biases;
  // An `nvfp4_token_format`.
  uint32_t token_format;
  // Whether NVFP4 tokens are quantized with their experts' input scales. If not, each token has its own global
  // scale.
  bool input_scales;
} nvfp4_moe_sizes;

// A projection of every expert, in a checkpoint's layout: `rows` of `k` numbers per expert.
typedef struct nvfp4_tensor {
  // The first expert's values, `rows * k/2` bytes: two codes (e2m1) per byte, the code of the even column in the low
  // four bits.
  const uint8_t *values;
  // Bytes from one expert's values to the next expert's. On a GPU, this and the address `values` are multiples of
  // 16.
  size_t values_stride;
  // The first expert's scales, `rows * k/16` bytes (e4m3).
  const uint8_t *scales;
  // Bytes from one expert's scales to the next expert's.
  size_t scales_stride;
  // Each expert's global scale, the factor of its numbers. Always in host memory.
  const float *global_scales;
  // Biases, `rows` per expert, always in host memory; null if there are none.
  const float *bias;
  // Each expert's input scale from the checkpoint, always in host memory; for gate and up the larger one is used.
  // Read only if `nvfp4_moe_sizes.input_scales` is set; then every projection must have them.
  const float *input_scales;
} nvfp4_tensor;

// The projections of a layer's experts: gate and up `[I, H]`, down `[H, I]`.
typedef struct nvfp4_moe_tensors {
  // Gate. Ignored if the activation has no gate.
  struct nvfp4_tensor gate;
  // Up.
  struct nvfp4_tensor up;
  // Down.
  struct nvfp4_tensor down;
} nvfp4_moe_tensors;

// Inputs and outputs of a call of an MoE layer. On a GPU, the pointers point to its memory.
typedef struct nvfp4_moe_call {
  // T, number of tokens; may be 0.
  size_t tokens;
  // T rows of H numbers of the token type. On a GPU the address is a multiple of 16 bytes.
  const uint16_t *hidden_states;
  // Elements from one row to the next, at least H. On a GPU a multiple of 8.
  size_t hidden_stride;
  // `[T, k]`: the experts of each token. A negative id contributes nothing.
  const int32_t *topk_ids;
  // `[T, k]`: their weights.
  const float *topk_weights;
  // Whether weights multiply the tokens instead of the experts' results. Only if k = 1 and there is no shared
  // expert.
  bool weights_on_input;
  // `[T]`: the shared expert's weights; null if all are 1.
  const float *shared_weights;
  // Output: T rows of H numbers. Overlaps no input.
  uint16_t *output;
  // Elements from one row of the output to the next, with the limits of `hidden_stride`.
  size_t output_stride;
} nvfp4_moe_call;

// Sizes of a linear layer. Zero fields mean: no bias, 16-bit tokens.
typedef struct nvfp4_linear_sizes {
  // N, rows of the weight: a multiple of 16.
  size_t out_features;
  // K, elements of a token: a multiple of 16.
  size_t in_features;
  // An `nvfp4_dtype`: the token type.
  uint32_t dtype;
  // Whether there is a bias.
  bool bias;
  // An `nvfp4_token_format`.
  uint32_t token_format;
} nvfp4_linear_sizes;

// A weight in a checkpoint's layout.
typedef struct nvfp4_linear_tensor {
  // Values, `N * K/2` bytes, packed as in `nvfp4_tensor`. On a GPU in its memory, at a multiple of 8, or of 16 for
  // FP8 or NVFP4 tokens.
  const uint8_t *values;
  // Scales, `N * K/16` bytes. On a GPU in its memory.
  const uint8_t *scales;
  // The global scale.
  float global_scale;
  // N biases, always in host memory; null if there is no bias.
  const float *bias;
  // For NVFP4 tokens, their global scale from the checkpoint; 0: each token has its own.
  float input_scale;
} nvfp4_linear_tensor;

// Inputs and outputs of a call of a linear layer. On a GPU, the pointers point to its memory.
typedef struct nvfp4_linear_call {
  // M, number of tokens; may be 0.
  size_t tokens;
  // M rows of K numbers of the token type. On a GPU the address is a multiple of 16 bytes.
  const uint16_t *x;
  // Elements from one row to the next, at least K. On a GPU a multiple of 8.
  size_t x_stride;
  // Output: M rows of N numbers, without gaps. On a GPU the address is a multiple of 16 bytes. Overlaps no input.
  uint16_t *output;
} nvfp4_linear_call;

// A router. The fields below `scoring` belong only to the scorings that they name.
typedef struct nvfp4_router {
  // E, number of experts: 1 to 1024.
  size_t experts;
  // k, experts per token: 1 to 32.
  size_t top_k;
  // An `nvfp4_scoring`.
  uint32_t scoring;
  // Whether weights are divided by their sum. For `NVFP4_SCORING_SOFTMAX`, `NVFP4_SCORING_SIGMOID_GROUPS` and rules.
  bool renormalise;
  // Number of groups of neighboring experts, all of the same size; 1: no groups. This and the fields up to `bias` are
  // for `NVFP4_SCORING_SIGMOID_GROUPS` and rules.
  size_t groups;
  // Number of groups from which experts may be selected.
  size_t top_groups;
  // Factor of the final weights; 1: none.
  float scale;
  // Biases `[E]`, finite; in the memory of the device that computes. Rules compare experts by score + bias, and
  // without biases (null) by logit.
  const float *bias;
  // Whether groups are compared by the sum of their two best experts, instead of the best one. Requires biases. This
  // and all fields below are for rules.
  bool best_two;
  // One finite factor of the weights per expert, `[E]`, in the memory of the device that computes; null for none.
  const float *expert_scale;
  // Number of the last experts that have no weights. If one of them is selected, its id is -1, and its weight stays.
  size_t null_experts;
  // Table of the experts of each token id, `[vocabulary, k]`, in the memory of the device that computes. It replaces
  // the selection by logits; null for none.
  const int32_t *table;
  // Number of token ids in `table`.
  size_t vocabulary;
} nvfp4_router;

// Inputs and outputs of a router call. On a GPU, the pointers point to its memory.
typedef struct nvfp4_route_call {
  // T, number of tokens; may be 0.
  size_t tokens;
  // T rows of E numbers.
  const void *logits;
  // An `nvfp4_logit_type`.
  uint32_t logit_type;
  // Elements from one row to the next, at least E.
  size_t logits_stride;
  // `[T]`: the id of each token, for a router with a table; otherwise null.
  const int32_t *token_ids;
  // `[T, k]`: output, the experts of each token.
  int32_t *ids;
  // `[T, k]`: output, their weights.
  float *weights;
} nvfp4_route_call;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Makes a layer from tensors in host memory, and copies them. `shared` is null if `sizes` has no shared expert.
// `expert_map` is null if tokens name experts by their index in the layer. Otherwise it has `named_experts` indices,
// negative for experts on other devices.
//
// # Safety
//
// The pointers point to host memory of these sizes.
enum nvfp4_status nvfp4_moe_cpu_create(const struct nvfp4_moe_sizes *sizes,
                                       const struct nvfp4_moe_tensors *tensors,
                                       const struct nvfp4_moe_tensors *shared,
                                       const int32_t *expert_map,
                                       struct nvfp4_moe_cpu **layer);

// Computes a call. Its pointers point to host memory.
//
// # Safety
//
// The layer was made by `nvfp4_moe_cpu_create` and not destroyed. The call's memory has the sizes that the call
// states.
enum nvfp4_status nvfp4_moe_cpu_run(struct nvfp4_moe_cpu *layer, const struct nvfp4_moe_call *call);

// Frees a layer. Does nothing for null.
//
// # Safety
//
// The layer was made by `nvfp4_moe_cpu_create`, no call uses it, and it is not used again.
void nvfp4_moe_cpu_destroy(struct nvfp4_moe_cpu *layer);

// Opens device `ordinal` in its primary context, which the CUDA runtime uses too. The context stays open.
//
// # Safety
//
// `device` points to host memory.
enum nvfp4_status nvfp4_device_open(uint32_t ordinal, struct nvfp4_device **device);

// Closes a device. Does nothing for null.
//
// # Safety
//
// `nvfp4_device_open` opened the device, none of its work is in flight, and it is not used again.
void nvfp4_device_close(struct nvfp4_device *device);

// Writes the bytes of a layer's packed weights on a GPU, and of the workspace of a call with up to `tokens` tokens.
// Layers whose calls follow one another on a stream can share a workspace.
//
// # Safety
//
// The pointers point to host memory.
enum nvfp4_status nvfp4_moe_bytes(const struct nvfp4_moe_sizes *sizes,
                                  size_t tokens,
                                  size_t *weights,
                                  size_t *workspace);

// Queues the packing of a checkpoint's tensors, which are in the GPU's memory. They may be freed when the stream has
// passed the packing. `shared` is null if `sizes` has no shared expert.
//
// The GPU checks the block scales. When the stream has passed the packing, copy the first `NVFP4_MOE_HEAD_BYTES` of
// the weights to the host and pass them to `nvfp4_moe_check_packed`.
//
// # Safety
//
// - `stream` is null or a `CUstream` (or `cudaStream_t`) of the device's primary context, and is not being captured.
// - `weights` is a multiple of 256 and points to the number of bytes that `nvfp4_moe_bytes` returns.
// - The tensors' pointers point to memory of these sizes.
enum nvfp4_status nvfp4_moe_pack(const struct nvfp4_device *device,
                                 const struct nvfp4_moe_sizes *sizes,
                                 const struct nvfp4_moe_tensors *tensors,
                                 const struct nvfp4_moe_tensors *shared,
                                 void *weights,
                                 void *stream);

// Checks that the block scales of packed weights were valid.
//
// # Safety
//
// The pointers point to host memory; `head` points to the first `NVFP4_MOE_HEAD_BYTES` bytes of the weights.
enum nvfp4_status nvfp4_moe_check_packed(const struct nvfp4_moe_sizes *sizes, const uint8_t *head);

// Queues a call and returns without waiting. It allocates nothing, so the stream may be captured into a graph. The
// graph is correct for any ids and weights that the memory holds when the graph runs.
//
// # Safety
//
// - `weights` were packed for these sizes. `expert_map` is null or points to the GPU's memory.
// - The call's pointers point to memory of these sizes that the GPU can use.
// - `workspace` is a multiple of 256 and points to the number of bytes that `nvfp4_moe_bytes` returns.
// - All this memory stays allocated until the stream has passed the call.
// - `stream` is null or a `CUstream` (or `cudaStream_t`) of the device's primary context; it may be captured.
enum nvfp4_status nvfp4_moe_launch(const struct nvfp4_device *device,
                                   const struct nvfp4_moe_sizes *sizes,
                                   const void *weights,
                                   const int32_t *expert_map,
                                   const struct nvfp4_moe_call *call,
                                   void *workspace,
                                   void *stream);

// Makes a layer from a tensor in host memory, and copies it.
//
// # Safety
//
// The pointers point to host memory of these sizes.
enum nvfp4_status nvfp4_linear_cpu_create(const struct nvfp4_linear_sizes *sizes,
                                          const struct nvfp4_linear_tensor *tensor,
                                          struct nvfp4_linear_cpu **layer);

// Computes a call. Its pointers point to host memory.
//
// # Safety
//
// The layer was made by `nvfp4_linear_cpu_create` and not destroyed. The call's memory has the sizes that the call
// states.
enum nvfp4_status nvfp4_linear_cpu_run(struct nvfp4_linear_cpu *layer, const struct nvfp4_linear_call *call);

// Frees a layer. Does nothing for null.
//
// # Safety
//
// The layer was made by `nvfp4_linear_cpu_create`, no call uses it, and it is not used again.
void nvfp4_linear_cpu_destroy(struct nvfp4_linear_cpu *layer);

// Writes the bytes of a layer's packed weights on a GPU, and of the workspace of a call with up to `tokens` tokens: 0
// for 16-bit tokens.
//
// # Safety
//
// The pointers point to host memory.
enum nvfp4_status nvfp4_linear_bytes(const struct nvfp4_linear_sizes *sizes,
                                     size_t tokens,
                                     size_t *weights,
                                     size_t *workspace);

// Queues the packing of a checkpoint's tensor, which is in the GPU's memory. It may be freed when the stream has
// passed the packing. Wait for the packing before the first call: copy the first `NVFP4_LINEAR_HEAD_BYTES` of the
// weights to the host and pass them to `nvfp4_linear_check_packed`, which checks the block scales.
//
// # Safety
//
// - `stream` is null or a `CUstream` (or `cudaStream_t`) of the device's primary context, and is not being captured.
// - `weights` is a multiple of 256 and points to the number of bytes that `nvfp4_linear_bytes` returns.
// - The tensor's pointers point to memory of these sizes.
enum nvfp4_status nvfp4_linear_pack(const struct nvfp4_device *device,
                                    const struct nvfp4_linear_sizes *sizes,
                                    const struct nvfp4_linear_tensor *tensor,
                                    void *weights,
                                    void *stream);

// Checks that the block scales of packed weights were valid.
//
// # Safety
//
// The pointers point to host memory; `head` points to the first `NVFP4_LINEAR_HEAD_BYTES` bytes of the weights.
enum nvfp4_status nvfp4_linear_check_packed(const struct nvfp4_linear_sizes *sizes, const uint8_t *head);

// Queues a call and returns without waiting. It allocates nothing, so the stream may be captured into a graph.
//
// # Safety
//
// - `weights` were packed for these sizes, and the packing is complete.
// - The call's pointers point to memory of these sizes that the GPU can use.
// - `workspace` is a multiple of 256 and points to the number of bytes that `nvfp4_linear_bytes` returns; null if it
//   returns 0.
// - All this memory stays allocated until the stream has passed the call.
// - `stream` is null or a `CUstream` (or `cudaStream_t`) of the device's primary context; it may be captured.
enum nvfp4_status nvfp4_linear_launch(const struct nvfp4_device *device,
                                      const struct nvfp4_linear_sizes *sizes,
                                      const void *weights,
                                      const struct nvfp4_linear_call *call,
                                      void *workspace,
                                      void *stream);

// Quantizes a matrix of f32 `[rows, k]`, k a multiple of 16, with the algorithm of NVIDIA's ModelOpt, on the CPU.
// Writes `rows * k/2` bytes of values, `rows * k/16` bytes of scales, and the global scale.
//
// # Safety
//
// The pointers point to host memory of these sizes.
enum nvfp4_status nvfp4_quantize(const float *numbers,
                                 size_t rows,
                                 size_t k,
                                 uint8_t *values,
                                 uint8_t *scales,
                                 float *global_scale);

// Writes the numbers of a quantized matrix, `[rows, k]`, on the CPU.
//
// # Safety
//
// The pointers point to host memory of these sizes.
enum nvfp4_status nvfp4_dequantize(const uint8_t *values,
                                   const uint8_t *scales,
                                   float global_scale,
                                   size_t rows,
                                   size_t k,
                                   float *numbers);

// Selects experts on the CPU.
//
// # Safety
//
// All pointers, also the router's biases and the call's pointers, point to host memory of these sizes.
enum nvfp4_status nvfp4_route_cpu(const struct nvfp4_router *router, const struct nvfp4_route_call *call);

// Queues the selection of experts and returns without waiting. It allocates nothing, so the stream may be captured
// into a graph.
//
// # Safety
//
// - The router's biases and the call's pointers point to memory of these sizes that the GPU can use. The memory stays
//   allocated until the stream has passed the call.
// - `stream` is null or a `CUstream` (or `cudaStream_t`) of the device's primary context.
enum nvfp4_status nvfp4_route_launch(const struct nvfp4_device *device,
                                     const struct nvfp4_router *router,
                                     const struct nvfp4_route_call *call,
                                     void *stream);

// Returns the message of this thread's last failed call. The pointer is valid until the thread's next failed call.
const char *nvfp4_last_error(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* NVFP4_H */

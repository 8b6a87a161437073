#ifndef NVFP4_H
#define NVFP4_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Bytes that packed weights begin with, for `nvfp4_moe_check_packed`.
#define NVFP4_MOE_HEAD_BYTES 48

// Bytes that a linear layer's packed weights begin with, for `nvfp4_linear_check_packed`.
#define NVFP4_LINEAR_HEAD_BYTES 8

// What a call answers.
typedef enum nvfp4_status {
  // It was done, or queued.
  NVFP4_STATUS_OK = 0,
  // An argument is wrong.
  NVFP4_STATUS_INVALID = 1,
  // There is no such device, it failed, or it computes no such layer.
  NVFP4_STATUS_DEVICE = 2,
  // A bug of the library.
  NVFP4_STATUS_BUG = 3,
} nvfp4_status;

// What becomes of an element g of the gate projection and u of the up projection.
typedef enum nvfp4_activation {
  // silu(g) * u.
  NVFP4_ACTIVATION_SILU = 0,
  // silu(min(g, limit)) * clamp(u, -limit, limit).
  NVFP4_ACTIVATION_SILU_LIMIT = 1,
  // gelu(g) * u, by tanh.
  NVFP4_ACTIVATION_GELU_TANH = 2,
  // x * sigmoid(alpha * x) * (clamp(u, -limit, limit) + 1) with x = min(g, limit). gpt-oss has alpha = 1.702, limit = 7.
  NVFP4_ACTIVATION_GPT_OSS = 3,
  // max(u, 0)^2; there is no gate.
  NVFP4_ACTIVATION_RELU2 = 4,
} nvfp4_activation;

// The type of tokens, and of what a layer makes of them.
typedef enum nvfp4_dtype {
  // IEEE's binary16.
  NVFP4_DTYPE_F16 = 0,
  // bfloat16.
  NVFP4_DTYPE_BF16 = 1,
} nvfp4_dtype;

// The type of logits.
typedef enum nvfp4_logit_type {
  // IEEE's binary16.
  NVFP4_LOGIT_TYPE_F16 = 0,
  // bfloat16.
  NVFP4_LOGIT_TYPE_BF16 = 1,
  // IEEE's binary32.
  NVFP4_LOGIT_TYPE_F32 = 2,
} nvfp4_logit_type;

// How a router chooses experts and weighs them. Of equal ones the lower expert comes first.
typedef enum nvfp4_scoring {
  // Softmax over all experts, then the k largest.
  NVFP4_SCORING_SOFTMAX = 0,
  // The k largest logits, then softmax over these.
  NVFP4_SCORING_TOP_K_SOFTMAX = 1,
  // The largest logit, whose sigmoid is the weight, for a layer's input; k = 1.
  NVFP4_SCORING_SIGMOID_TOP1 = 2,
  // Experts by sigmoid + bias, of the groups that are best by the sum of their two largest; weights are sigmoids without bias.
  NVFP4_SCORING_SIGMOID_GROUPS = 3,
} nvfp4_scoring;

// As what a layer's tokens, and the intermediate of an MoE layer, are multiplied.
typedef enum nvfp4_token_format {
  // As they are.
  NVFP4_TOKEN_FORMAT_BITS16 = 0,
  // As FP8 (e4m3) with a scale for each token, with weights rounded to e4m3: faster on Hopper for many tokens, less accurate.
  NVFP4_TOKEN_FORMAT_FP8 = 1,
  // As NVFP4, by input scales or with a global scale for each token, with weights as they are: on GPUs, Blackwell alone.
  NVFP4_TOKEN_FORMAT_NVFP4 = 2,
} nvfp4_token_format;

// A GPU with its kernels loaded. Any number of threads may use it at once.
typedef struct nvfp4_device nvfp4_device;

// A linear layer prepared for the CPU. Several threads may run calls at once.
typedef struct nvfp4_linear_cpu nvfp4_linear_cpu;

// An MoE layer prepared for the CPU. Several threads may run calls at once.
typedef struct nvfp4_moe_cpu nvfp4_moe_cpu;

// The sizes of an MoE layer. What is left zero is as in most models: SiLU, no shared expert, no biases,
// tokens of 16 bits without input scales.
typedef struct nvfp4_moe_sizes {
  // H, elements of a token: a multiple of 16.
  size_t hidden;
  // I, rows of gate and up: a multiple of 16.
  size_t intermediate;
  // E, experts that the layer holds: 1 to 512.
  size_t experts;
  // Experts that a token can name: the length of the expert map, or E.
  size_t named_experts;
  // k, experts that a token names: 1 to 32.
  size_t top_k;
  // I of the expert that every token has; 0 if there is none.
  size_t shared_intermediate;
  // An `nvfp4_dtype`: the type of tokens.
  uint32_t dtype;
  // An `nvfp4_activation`.
  uint32_t activation;
  // Of the activation, if it has one.
  float alpha;
  // Of the activation, if it has one.
  float limit;
  // Whether projections have biases.
  bool biases;
  // An `nvfp4_token_format`.
  uint32_t token_format;
  // Whether tokens in NVFP4 are quantized by their experts' input scales. If not, each token has a global scale of its own.
  bool input_scales;
} nvfp4_moe_sizes;

// A projection of every expert, as a checkpoint has it: `rows` of `k` numbers an expert.
typedef struct nvfp4_tensor {
  // The first expert's values, `rows * k/2` bytes: two codes (e2m1) a byte, the one of the even column in the low four bits.
  const uint8_t *values;
  // Bytes from one expert's values to the next one's; a multiple of 16 on a GPU, where `values` is at one too.
  size_t values_stride;
  // The first expert's scales, `rows * k/16` bytes (e4m3).
  const uint8_t *scales;
  // Bytes from one expert's scales to the next one's.
  size_t scales_stride;
  // Each expert's global scale, by which its numbers are multiplied. In host memory, always.
  const float *global_scales;
  // Biases, `rows` for each expert, in host memory, always; null if there are none.
  const float *bias;
  // Each expert's input scale as a checkpoint carries it, in host memory, always: of gate and up the larger counts. Not looked at
  // unless the sizes say that there are some; then all projections have them.
  const float *input_scales;
} nvfp4_tensor;

// The projections of a layer's experts: gate and up `[I, H]`, down `[H, I]`.
typedef struct nvfp4_moe_tensors {
  // Gate. Not looked at if the activation has none.
  struct nvfp4_tensor gate;
  // Up.
  struct nvfp4_tensor up;
  // Down.
  struct nvfp4_tensor down;
} nvfp4_moe_tensors;

// What a call of a layer reads and writes; on a GPU pointers to its memory.
typedef struct nvfp4_moe_call {
  // T; may be 0.
  size_t tokens;
  // T rows of H numbers of the layer's type. On a GPU at a multiple of 16 bytes.
  const uint16_t *hidden_states;
  // Elements from one row to the next, at least H. On a GPU a multiple of 8.
  size_t hidden_stride;
  // `[T, k]`: the experts of each token. A negative one contributes nothing.
  const int32_t *topk_ids;
  // `[T, k]`: their weights.
  const float *topk_weights;
  // Whether weights multiply the tokens rather than the experts' results: only if k = 1 and there is no shared expert.
  bool weights_on_input;
  // `[T]`: the shared expert's weights; null if all are 1.
  const float *shared_weights;
  // Where the T rows of H numbers go. Overlaps nothing else.
  uint16_t *output;
  // Elements from one row of the output to the next, as `hidden_stride`.
  size_t output_stride;
} nvfp4_moe_call;

// The sizes of a linear layer. What is left zero: no bias, tokens of 16 bits.
typedef struct nvfp4_linear_sizes {
  // N, rows of the weight: a multiple of 16.
  size_t out_features;
  // K, elements of a token: a multiple of 16.
  size_t in_features;
  // An `nvfp4_dtype`: the type of tokens.
  uint32_t dtype;
  // Whether there is a bias.
  bool bias;
  // An `nvfp4_token_format`.
  uint32_t token_format;
} nvfp4_linear_sizes;

// A weight as a checkpoint has it.
typedef struct nvfp4_linear_tensor {
  // Values, `N * K/2` bytes, as `nvfp4_tensor`. On a GPU in its memory, at a multiple of 8, or for tokens in FP8 or NVFP4
  // of 16.
  const uint8_t *values;
  // Scales, `N * K/16` bytes. On a GPU in its memory.
  const uint8_t *scales;
  // The global scale.
  float global_scale;
  // N numbers in host memory, always; null if there is none.
  const float *bias;
  // With tokens in NVFP4, their global scale as a checkpoint carries it; 0 if each token is to have one of its own.
  float input_scale;
} nvfp4_linear_tensor;

// What a call of a layer reads and writes; on a GPU pointers to its memory.
typedef struct nvfp4_linear_call {
  // M; may be 0.
  size_t tokens;
  // M rows of K numbers of the layer's type. On a GPU at a multiple of 16 bytes.
  const uint16_t *x;
  // Elements from one row to the next, at least K. On a GPU a multiple of 8.
  size_t x_stride;
  // Where the M rows of N numbers go, without gaps. On a GPU at a multiple of 16 bytes. Overlaps nothing else.
  uint16_t *output;
} nvfp4_linear_call;

// A router. What stands below `scoring` is of those that it says alone.
typedef struct nvfp4_router {
  // E: 1 to 512.
  size_t experts;
  // k, experts that a token gets: 1 to 32.
  size_t top_k;
  // An `nvfp4_scoring`.
  uint32_t scoring;
  // Whether weights are divided by their sum: of `NVFP4_SCORING_SOFTMAX` and `NVFP4_SCORING_SIGMOID_GROUPS`.
  bool renormalise;
  // Groups of neighboring experts, equally many in each, 1 for none: of `NVFP4_SCORING_SIGMOID_GROUPS`, as all below.
  size_t groups;
  // Groups whose experts may be chosen.
  size_t top_groups;
  // What weights are multiplied with at last; 1 for nothing.
  float scale;
  // `[E]`, finite: on a GPU in its memory.
  const float *bias;
} nvfp4_router;

// What a call of a router reads and writes; on a GPU pointers to its memory.
typedef struct nvfp4_route_call {
  // T; may be 0.
  size_t tokens;
  // T rows of E numbers.
  const void *logits;
  // An `nvfp4_logit_type`.
  uint32_t logit_type;
  // Elements from one row to the next, at least E.
  size_t logits_stride;
  // `[T, k]`: where the experts of each token go.
  int32_t *ids;
  // `[T, k]`: where their weights go.
  float *weights;
} nvfp4_route_call;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Makes a layer of tensors in host memory, which are copied. `shared` is null if the sizes say that there is no shared expert,
// `expert_map` if tokens name experts by the layer's own numbers; else it has `named_experts` of those, negative for experts that
// live elsewhere.
//
// # Safety
//
// The pointers are to host memory of these sizes.
enum nvfp4_status nvfp4_moe_cpu_create(const struct nvfp4_moe_sizes *sizes,
                                       const struct nvfp4_moe_tensors *tensors,
                                       const struct nvfp4_moe_tensors *shared,
                                       const int32_t *expert_map,
                                       struct nvfp4_moe_cpu **layer);

// Computes a call, whose pointers are to host memory.
//
// # Safety
//
// The layer was made by `nvfp4_moe_cpu_create` and not destroyed. The call's memory has the sizes that it says.
enum nvfp4_status nvfp4_moe_cpu_run(struct nvfp4_moe_cpu *layer, const struct nvfp4_moe_call *call);

// Frees a layer. Null is nothing.
//
// # Safety
//
// The layer was made by `nvfp4_moe_cpu_create`, is in no call, and is not used again.
void nvfp4_moe_cpu_destroy(struct nvfp4_moe_cpu *layer);

// Opens device `ordinal`: its primary context, which the CUDA runtime uses too. It stays open.
//
// # Safety
//
// `device` is to host memory.
enum nvfp4_status nvfp4_device_open(uint32_t ordinal, struct nvfp4_device **device);

// Gives a device back. Null is nothing.
//
// # Safety
//
// It was opened by `nvfp4_device_open`, nothing of it is under way, and it is not used again.
void nvfp4_device_close(struct nvfp4_device *device);

// Bytes of a layer's packed weights on a GPU, and of the workspace of a call with up to `tokens` tokens. Layers whose calls come one
// after the other on a stream can share a workspace.
//
// # Safety
//
// The pointers are to host memory.
enum nvfp4_status nvfp4_moe_bytes(const struct nvfp4_moe_sizes *sizes,
                                  size_t tokens,
                                  size_t *weights,
                                  size_t *workspace);

// Queues the packing of a checkpoint's tensors, which lie in the GPU's memory and are not needed any more when the stream has come
// past it. `shared` is null if the sizes say that there is no shared expert.
//
// Whether block scales are valid is found out on the GPU: when the stream has come past this, copy the first
// `NVFP4_MOE_HEAD_BYTES` of the weights to the host and give them to `nvfp4_moe_check_packed`.
//
// # Safety
//
// `stream` is a `CUstream` (or `cudaStream_t`) of the device's primary context, or null, and captures nothing. At `weights`, a
// multiple of 256, are as many bytes as `nvfp4_moe_bytes` says.
enum nvfp4_status nvfp4_moe_pack(const struct nvfp4_device *device,
                                 const struct nvfp4_moe_sizes *sizes,
                                 const struct nvfp4_moe_tensors *tensors,
                                 const struct nvfp4_moe_tensors *shared,
                                 void *weights,
                                 void *stream);

// Says whether the block scales of packed weights were valid.
//
// # Safety
//
// The pointers are to host memory; `head` to the first `NVFP4_MOE_HEAD_BYTES` of the weights.
enum nvfp4_status nvfp4_moe_check_packed(const struct nvfp4_moe_sizes *sizes, const uint8_t *head);

// Queues a call, and returns without waiting. It allocates nothing, so the stream may be captured into a graph, which is then right
// for whatever ids and weights lie there when it runs.
//
// # Safety
//
// `weights` were packed for these sizes, and `expert_map` is null or in the GPU's memory. The call's pointers are to memory of
// these sizes that the GPU can use, and `workspace`, a multiple of 256, to as many bytes as `nvfp4_moe_bytes` says. All of it stays
// until the stream has come past the call. `stream` is as `nvfp4_moe_pack` says, but may capture.
enum nvfp4_status nvfp4_moe_launch(const struct nvfp4_device *device,
                                   const struct nvfp4_moe_sizes *sizes,
                                   const void *weights,
                                   const int32_t *expert_map,
                                   const struct nvfp4_moe_call *call,
                                   void *workspace,
                                   void *stream);

// Makes a layer of a tensor in host memory, which is copied.
//
// # Safety
//
// The pointers are to host memory of these sizes.
enum nvfp4_status nvfp4_linear_cpu_create(const struct nvfp4_linear_sizes *sizes,
                                          const struct nvfp4_linear_tensor *tensor,
                                          struct nvfp4_linear_cpu **layer);

// Computes a call, whose pointers are to host memory.
//
// # Safety
//
// The layer was made by `nvfp4_linear_cpu_create` and not destroyed. The call's memory has the sizes that it says.
enum nvfp4_status nvfp4_linear_cpu_run(struct nvfp4_linear_cpu *layer, const struct nvfp4_linear_call *call);

// Frees a layer. Null is nothing.
//
// # Safety
//
// The layer was made by `nvfp4_linear_cpu_create`, is in no call, and is not used again.
void nvfp4_linear_cpu_destroy(struct nvfp4_linear_cpu *layer);

// Bytes of a layer's packed weights on a GPU, and of the workspace of a call with up to so many tokens: 0 with tokens of 16 bits.
//
// # Safety
//
// The pointers are to host memory.
enum nvfp4_status nvfp4_linear_bytes(const struct nvfp4_linear_sizes *sizes,
                                     size_t tokens,
                                     size_t *weights,
                                     size_t *workspace);

// Queues the packing of a checkpoint's tensor, which lies in the GPU's memory and is not needed any more when the stream has come
// past it. Wait for that before the first call: copy the first `NVFP4_LINEAR_HEAD_BYTES` of the weights to the host and give them
// to `nvfp4_linear_check_packed`, which says whether block scales are valid.
//
// # Safety
//
// `stream` is a `CUstream` (or `cudaStream_t`) of the device's primary context, or null, and captures nothing. At `weights`, a
// multiple of 256, are as many bytes as `nvfp4_linear_bytes` says.
enum nvfp4_status nvfp4_linear_pack(const struct nvfp4_device *device,
                                    const struct nvfp4_linear_sizes *sizes,
                                    const struct nvfp4_linear_tensor *tensor,
                                    void *weights,
                                    void *stream);

// Says whether the block scales of packed weights were valid.
//
// # Safety
//
// The pointers are to host memory; `head` to the first `NVFP4_LINEAR_HEAD_BYTES` of the weights.
enum nvfp4_status nvfp4_linear_check_packed(const struct nvfp4_linear_sizes *sizes, const uint8_t *head);

// Queues a call, and returns without waiting. It allocates nothing, so the stream may be captured into a graph.
//
// # Safety
//
// `weights` were packed for these sizes, and that was waited for. The call's pointers are to memory of these sizes that the GPU can
// use, and `workspace`, a multiple of 256, to as many bytes as `nvfp4_linear_bytes` says; null if that is 0. All of it stays until the
// stream has come past the call. `stream` is as `nvfp4_linear_pack` says, but may capture.
enum nvfp4_status nvfp4_linear_launch(const struct nvfp4_device *device,
                                      const struct nvfp4_linear_sizes *sizes,
                                      const void *weights,
                                      const struct nvfp4_linear_call *call,
                                      void *workspace,
                                      void *stream);

// Quantizes a matrix of f32 `[rows, k]`, k a multiple of 16, by the algorithm of NVIDIA's ModelOpt. Writes `rows * k/2` bytes of
// values, `rows * k/16` of scales, and the global scale. On the CPU.
//
// # Safety
//
// The pointers are to host memory of these sizes.
enum nvfp4_status nvfp4_quantize(const float *numbers,
                                 size_t rows,
                                 size_t k,
                                 uint8_t *values,
                                 uint8_t *scales,
                                 float *global_scale);

// Writes the numbers of a quantized matrix, `[rows, k]`. On the CPU.
//
// # Safety
//
// The pointers are to host memory of these sizes.
enum nvfp4_status nvfp4_dequantize(const uint8_t *values,
                                   const uint8_t *scales,
                                   float global_scale,
                                   size_t rows,
                                   size_t k,
                                   float *numbers);

// Chooses experts on the CPU.
//
// # Safety
//
// The pointers, the router's biases and the call's among them, are to host memory of these sizes.
enum nvfp4_status nvfp4_route_cpu(const struct nvfp4_router *router, const struct nvfp4_route_call *call);

// Queues the choice of experts, and returns without waiting. It allocates nothing, so the stream may be captured into a graph.
//
// # Safety
//
// The router's biases and what the call points to lie in memory of these sizes that the GPU can use, and stay until the stream has come
// past the call. `stream` is a `CUstream` (or `cudaStream_t`) of the device's primary context, or null.
enum nvfp4_status nvfp4_route_launch(const struct nvfp4_device *device,
                                     const struct nvfp4_router *router,
                                     const struct nvfp4_route_call *call,
                                     void *stream);

// What went wrong in this thread's last call that failed, in words. Good until the next one fails.
const char *nvfp4_last_error(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* NVFP4_H */

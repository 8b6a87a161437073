/* An MoE layer of two experts and a linear layer on the CPU, from C: quantizes, computes, and compares with sums in double.
 *
 *   cc -Ic c/example/layer.c -o layer -Ltarget/release -lnvfp4_c -lm && LD_LIBRARY_PATH=target/release ./layer
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvfp4.h"

enum { E = 2, H = 64, I = 32, T = 3, K = 2 };

static void expect(nvfp4_status status) {
    if (status != NVFP4_STATUS_OK) {
        fprintf(stderr, "nvfp4: %s\n", nvfp4_last_error());
        exit(1);
    }
}

/* Rounds a number to bfloat16. */
static uint16_t to_bf16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Converts bfloat16 to a number. */
static float of_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float number;
    memcpy(&number, &wide, 4);
    return number;
}

/* Distance between two vectors of numbers, relative to the norm of `others`. */
static double distance(const uint16_t *numbers, const uint16_t *others, size_t count) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < count; i++) {
        double a = of_bf16(numbers[i]), b = of_bf16(others[i]);
        difference += (a - b) * (a - b), size += b * b;
    }
    return sqrt(difference / size);
}

/* A quantized projection of every expert, and its dequantized numbers. */
typedef struct {
    uint8_t values[E * H * I / 2], scales[E * H * I / 16];
    float global_scales[E], numbers[E * H * I];
} projection;

static nvfp4_tensor make(projection *of, size_t rows, size_t columns, unsigned seed) {
    for (size_t e = 0; e < E; e++) {
        float raw[H * I];
        for (size_t i = 0; i < H * I; i++) {
            seed = seed * 1664525u + 1013904223u;
            raw[i] = ((float)(seed >> 8) / (1 << 23) - 1) * (float)(1 + e) / 8;
        }
        uint8_t *values = of->values + e * H * I / 2, *scales = of->scales + e * H * I / 16;
        expect(nvfp4_quantize(raw, rows, columns, values, scales, &of->global_scales[e]));
        expect(nvfp4_dequantize(values, scales, of->global_scales[e], rows, columns, of->numbers + e * H * I));
    }
    return (nvfp4_tensor){of->values, H * I / 2, of->scales, H * I / 16, of->global_scales, NULL, NULL};
}

int main(void) {
    static projection gate, up, down;
    nvfp4_moe_tensors tensors = {make(&gate, I, H, 1), make(&up, I, H, 2), make(&down, H, I, 3)};
    nvfp4_moe_sizes sizes = {.hidden = H, .intermediate = I, .experts = E, .named_experts = E, .top_k = K, .dtype = NVFP4_DTYPE_BF16};
    nvfp4_moe_cpu *layer;
    expect(nvfp4_moe_cpu_create(&sizes, &tensors, NULL, NULL, &layer));

    uint16_t tokens[T * H], output[T * H];
    int32_t ids[T * K] = {0, 1, 1, -1, 0, 0};
    float weights[T * K] = {0.75f, 0.25f, 1, 0, 0.5f, 0.5f};
    for (size_t i = 0; i < T * H; i++) tokens[i] = to_bf16((float)(i * 37 % 101) / 50 - 1);
    nvfp4_moe_call call = {.tokens = T, .hidden_states = tokens, .hidden_stride = H, .topk_ids = ids, .topk_weights = weights,
                           .output = output, .output_stride = H};
    expect(nvfp4_moe_cpu_run(layer, &call));

    double worst = 0;
    for (size_t t = 0; t < T; t++) {
        double sums[H] = {0}, magnitudes[H] = {0};
        for (size_t k = 0; k < K; k++) {
            int32_t e = ids[t * K + k];
            if (e < 0) continue;
            for (size_t i = 0; i < I; i++) {
                double g = 0, u = 0;
                for (size_t h = 0; h < H; h++) {
                    double x = of_bf16(tokens[t * H + h]);
                    g += x * gate.numbers[(size_t)e * H * I + i * H + h];
                    u += x * up.numbers[(size_t)e * H * I + i * H + h];
                }
                double intermediate = weights[t * K + k] * g / (1 + exp(-g)) * u;
                for (size_t h = 0; h < H; h++) {
                    double product = intermediate * down.numbers[(size_t)e * H * I + h * I + i];
                    sums[h] += product;
                    magnitudes[h] += fabs(product);
                }
            }
        }
        /* Three roundings to bfloat16: the intermediate, the product and the output. */
        for (size_t h = 0; h < H; h++) {
            double error = fabs(of_bf16(output[t * H + h]) - sums[h]) / (magnitudes[h] / 256 * 3 + 1e-9);
            worst = fmax(worst, error);
        }
    }
    printf("%d tokens, at most %.2f of the rounding bound\n", T, worst);

    /* The same tokens with gpt-oss's activation and biases: a different output. */
    float gate_bias[E * I], down_bias[E * H];
    for (size_t i = 0; i < E * I; i++) gate_bias[i] = (float)i / 64;
    for (size_t i = 0; i < E * H; i++) down_bias[i] = (float)i / 32 - 1;
    nvfp4_moe_tensors biased = tensors;
    biased.gate.bias = gate_bias;
    biased.down.bias = down_bias;
    nvfp4_moe_sizes as_gpt_oss = sizes;
    as_gpt_oss.activation = "gpt-oss", as_gpt_oss.biases = true;
    nvfp4_moe_cpu *other;
    uint16_t others_output[T * H];
    call.output = others_output;
    expect(nvfp4_moe_cpu_create(&as_gpt_oss, &biased, NULL, NULL, &other));
    expect(nvfp4_moe_cpu_run(other, &call));
    nvfp4_moe_cpu_destroy(other);
    for (size_t t = 0; t < T; t++) {
        double sums[H] = {0}, magnitudes[H] = {0};
        for (size_t k = 0; k < K; k++) {
            int32_t e = ids[t * K + k];
            if (e < 0) continue;
            for (size_t h = 0; h < H; h++) sums[h] += weights[t * K + k] * down_bias[(size_t)e * H + h];
            for (size_t i = 0; i < I; i++) {
                double g = gate_bias[(size_t)e * I + i], u = 0;
                for (size_t h = 0; h < H; h++) {
                    double x = of_bf16(tokens[t * H + h]);
                    g += x * gate.numbers[(size_t)e * H * I + i * H + h];
                    u += x * up.numbers[(size_t)e * H * I + i * H + h];
                }
                g = fmin(g, 7), u = fmax(fmin(u, 7), -7);
                double intermediate = weights[t * K + k] * g / (1 + exp(-1.702 * g)) * (u + 1);
                for (size_t h = 0; h < H; h++) {
                    double product = intermediate * down.numbers[(size_t)e * H * I + h * I + i];
                    sums[h] += product;
                    magnitudes[h] += fabs(product);
                }
            }
        }
        for (size_t h = 0; h < H; h++) {
            double error = fabs(of_bf16(others_output[t * H + h]) - sums[h]) / ((magnitudes[h] + fabs(sums[h])) / 256 * 3 + 1e-9);
            worst = fmax(worst, error);
        }
    }

    /* The first expert's gate as a linear layer with a bias. */
    nvfp4_linear_sizes linear = {.out_features = I, .in_features = H, .dtype = NVFP4_DTYPE_BF16, .bias = true};
    nvfp4_linear_tensor weight = {gate.values, gate.scales, gate.global_scales[0], gate_bias, 0};
    nvfp4_linear_cpu *one;
    uint16_t projected[T * I];
    nvfp4_linear_call of_linear = {.tokens = T, .x = tokens, .x_stride = H, .output = projected};
    expect(nvfp4_linear_cpu_create(&linear, &weight, &one));
    expect(nvfp4_linear_cpu_run(one, &of_linear));
    nvfp4_linear_cpu_destroy(one);
    for (size_t t = 0; t < T; t++) {
        for (size_t i = 0; i < I; i++) {
            double sum = gate_bias[i];
            for (size_t h = 0; h < H; h++) sum += of_bf16(tokens[t * H + h]) * (double)gate.numbers[i * H + h];
            worst = fmax(worst, fabs(of_bf16(projected[t * I + i]) - sum) / (fabs(sum) / 256 + 1e-5));
        }
    }
    printf("with gpt-oss's activation, and a linear layer: at most %.2f of the bound\n", worst);

    /* The same layers with FP8 tokens: different bits, but close. */
    uint16_t rounded[T * H];
    linear.token_format = NVFP4_TOKEN_FORMAT_FP8;
    of_linear.output = rounded;
    expect(nvfp4_linear_cpu_create(&linear, &weight, &one));
    expect(nvfp4_linear_cpu_run(one, &of_linear));
    nvfp4_linear_cpu_destroy(one);
    double linear_error = distance(rounded, projected, T * I);
    nvfp4_moe_sizes in_fp8 = sizes;
    in_fp8.token_format = NVFP4_TOKEN_FORMAT_FP8;
    call.output = rounded;
    expect(nvfp4_moe_cpu_create(&in_fp8, &tensors, NULL, NULL, &other));
    expect(nvfp4_moe_cpu_run(other, &call));
    nvfp4_moe_cpu_destroy(other);
    double moe_error = distance(rounded, output, T * H);
    printf("with FP8 tokens: relative distances %.3f and %.3f\n", linear_error, moe_error);
    if (!(linear_error > 0.001 && linear_error < 0.1 && moe_error > 0.001 && moe_error < 0.1)) return 4;

    /* And with NVFP4 tokens and input scales: the largest number / 448 leaves room below and above. */
    float largest = 0, scales[E];
    for (size_t i = 0; i < T * H; i++) largest = fmaxf(largest, fabsf((float)of_bf16(tokens[i])));
    for (size_t e = 0; e < E; e++) scales[e] = largest / 448;
    linear.token_format = NVFP4_TOKEN_FORMAT_NVFP4, weight.input_scale = scales[0];
    expect(nvfp4_linear_cpu_create(&linear, &weight, &one));
    expect(nvfp4_linear_cpu_run(one, &of_linear));
    nvfp4_linear_cpu_destroy(one);
    linear_error = distance(rounded, projected, T * I);
    nvfp4_moe_sizes in_nvfp4 = sizes;
    in_nvfp4.token_format = NVFP4_TOKEN_FORMAT_NVFP4, in_nvfp4.input_scales = true;
    nvfp4_moe_tensors calibrated = tensors;
    calibrated.gate.input_scales = calibrated.up.input_scales = calibrated.down.input_scales = scales;
    expect(nvfp4_moe_cpu_create(&in_nvfp4, &calibrated, NULL, NULL, &other));
    expect(nvfp4_moe_cpu_run(other, &call));
    nvfp4_moe_cpu_destroy(other);
    moe_error = distance(rounded, output, T * H);
    printf("with NVFP4 tokens: relative distances %.3f and %.3f\n", linear_error, moe_error);
    if (!(linear_error > 0.003 && linear_error < 0.3 && moe_error > 0.003 && moe_error < 0.3)) return 6;
    calibrated.up.input_scales = NULL;
    if (nvfp4_moe_cpu_create(&in_nvfp4, &calibrated, NULL, NULL, &other) != NVFP4_STATUS_INVALID) return 7;

    /* A router with softmax over the two selected experts. Rows of logits are 5 apart, and the first 4 belong to experts. */
    float logits[T * 5], of_chosen[T * K];
    int32_t chosen[T * K];
    for (size_t i = 0; i < T * 5; i++) logits[i] = (float)(i * 7 % 11) / 4;
    nvfp4_router router = {.experts = 4, .top_k = K, .scoring = NVFP4_SCORING_TOP_K_SOFTMAX};
    nvfp4_route_call of_router = {.tokens = T, .logits = logits, .logit_type = NVFP4_LOGIT_TYPE_F32, .logits_stride = 5,
                                  .ids = chosen, .weights = of_chosen};
    expect(nvfp4_route_cpu(&router, &of_router));
    for (size_t t = 0; t < T; t++) {
        const float *row = logits + t * 5;
        const int32_t first = chosen[t * K], second = chosen[t * K + 1];
        for (int32_t e = 0; e < 4; e++) {
            if (e != first && (row[e] > row[first] || (e != second && row[e] > row[second]))) return 8;
        }
        double weight = 1 / (1 + exp(row[second] - row[first]));
        if (fabs(of_chosen[t * K] - weight) > 1e-6 || fabs(of_chosen[t * K + 1] - (1 - weight)) > 1e-6) return 9;
    }
    printf("routed: %d and %d first\n", chosen[0], chosen[1]);
    router.scoring = NVFP4_SCORING_SIGMOID_GROUPS, router.groups = router.top_groups = 1, router.scale = 1;
    if (nvfp4_route_cpu(&router, &of_router) != NVFP4_STATUS_INVALID) return 10; /* The biases are missing. */

    in_fp8.token_format = 7;
    if (nvfp4_moe_cpu_create(&in_fp8, &tensors, NULL, NULL, &other) != NVFP4_STATUS_INVALID) return 5;

    sizes.intermediate = 24;
    if (nvfp4_moe_cpu_create(&sizes, &tensors, NULL, NULL, &layer) != NVFP4_STATUS_INVALID) return 2;
    printf("refused: %s\n", nvfp4_last_error());
    nvfp4_device *device;
    if (nvfp4_device_open(99, &device) != NVFP4_STATUS_DEVICE) return 3;
    printf("no GPU 99: %s\n", nvfp4_last_error());
    nvfp4_moe_cpu_destroy(layer);
    return worst <= 1 ? 0 : 1;
}

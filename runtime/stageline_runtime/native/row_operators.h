/* What is done to each row by itself: normalisation, with or without adding to the residual stream first, and the gate
 * of the feed-forward block. Each rounds where the plain operators round.
 *
 * Included by kernels.c with ELEMENT, WIDEN, ROUND and NAME set for one element type.
 */

/* rows / rms(rows) * weight; with `addend`, `addend` becomes rows + addend first, and that is normalised */
void NAME(rms_norm)(const ELEMENT *rows, ELEMENT *addend, const ELEMENT *weight, ELEMENT *output, int64_t num_rows,
                    int64_t size, float eps, int64_t num_threads) {
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1) schedule(static)
    for (int64_t r = 0; r < num_rows; r++) {
        const ELEMENT *row = rows + r * size;
        ELEMENT *normed = output + r * size;
        float sum = 0;
        if (addend) {
            ELEMENT *added = addend + r * size;
            for (int64_t i = 0; i < size; i++) added[i] = ROUND(WIDEN(row[i]) + WIDEN(added[i]));
            row = added;
        }
        for (int64_t i = 0; i < size; i++) {
            float wide = WIDEN(row[i]);
            sum += wide * wide;
        }
        float scale = 1 / sqrtf(sum / (float)size + eps);
        for (int64_t i = 0; i < size; i++) {
            ELEMENT scaled = ROUND(WIDEN(row[i]) * scale);
            normed[i] = ROUND(WIDEN(weight[i]) * WIDEN(scaled));
        }
    }
}

/* silu(gate) * up for rows `[gate, up]`, each of `size` */
void NAME(gate)(const ELEMENT *gate_up, ELEMENT *output, int64_t num_rows, int64_t size, int64_t num_threads) {
#pragma omp parallel for num_threads((int)num_threads) if (num_threads > 1) schedule(static)
    for (int64_t r = 0; r < num_rows; r++) {
        const ELEMENT *gate = gate_up + r * 2 * size, *up = gate + size;
        for (int64_t i = 0; i < size; i++) {
            float wide = WIDEN(gate[i]);
            float power = -wide < 80 ? -wide : 80; /* fast math knows no infinity */
            ELEMENT opened = ROUND(wide / (1 + expf(power)));
            output[r * size + i] = ROUND(WIDEN(opened) * WIDEN(up[i]));
        }
    }
}

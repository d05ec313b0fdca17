// Kernels for images of many clients with the batch innermost: (group, channel, height, width, batch).
//
// Whatever a kernel's point does to one sample it does to the whole batch, and to a run of neighbouring columns as well:
// the inner loops work on long contiguous runs, with a block of results in registers. fl_lightning/layout/native.py
// compiles this file and says what the arguments are.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

template <typename T>
struct Vector {
    static constexpr int lanes = 32 / sizeof(T);
    typedef T type __attribute__((vector_size(32), aligned(sizeof(T)), may_alias));
};

// Shapes of a convolution in groups. The order is that of native.py.
struct Sizes {
    int64_t groups, channels, height, width, batch;
    int64_t outputs, kernel_height, kernel_width;
    int64_t down, right;                        // stride
    int64_t above, before;                      // padding
    int64_t dilation_height, dilation_width;
    int64_t out_height, out_width;
    int64_t points() const { return kernel_height * kernel_width; }
};

// A point of the kernel along one axis, and the line or column of the source that it meets.
struct Meeting {
    int64_t point, place;
};

// The meetings of every place of the target, along one axis.
typedef std::vector<std::vector<Meeting>> Meetings;

Meetings forward_meetings(int64_t targets, int64_t sources, int64_t points, int64_t stride, int64_t padding,
                          int64_t dilation) {
    Meetings found(targets);
    for (int64_t target = 0; target < targets; target++)
        for (int64_t point = 0; point < points; point++) {
            int64_t place = target * stride - padding + point * dilation;
            if (place >= 0 && place < sources) found[target].push_back({point, place});
        }
    return found;
}

Meetings backward_meetings(int64_t targets, int64_t sources, int64_t points, int64_t stride, int64_t padding,
                           int64_t dilation) {
    Meetings found(targets);
    for (int64_t target = 0; target < targets; target++)
        for (int64_t point = 0; point < points; point++) {
            int64_t place = target + padding - point * dilation;
            if (place >= 0 && place % stride == 0 && place / stride < sources)
                found[target].push_back({point, place / stride});
        }
    return found;
}

// How many places from the given one on meet the source at the same points, each one place further than the last.
int64_t run_length(const Meetings& meetings, int64_t first) {
    const auto& own = meetings[first];
    int64_t length = 1;
    for (; first + length < (int64_t)meetings.size(); length++) {
        const auto& next = meetings[first + length];
        if (next.size() != own.size()) return length;
        for (std::size_t i = 0; i < own.size(); i++)
            if (next[i].point != own[i].point || next[i].place != own[i].place + length) return length;
    }
    return length;
}

// A point of the kernel: where its weight is, and where what it meets begins.
struct Tap {
    int64_t weight, source;
};

// What a run of results is the sum of: over `depth` channels of the source, and over taps.
template <typename T>
struct Sum {
    const T *source, *weight, *bias;  // no bias if null
    T* target;
    const std::vector<Tap>& taps;
    int64_t depth, source_step, weight_step;    // from one channel of the source to the next
    int64_t weight_apart, target_apart;         // from one channel of the target to the next
};

// `rows` channels of the target, `width` vectors of their run from `start` on.
template <typename T, int rows, int width>
inline void block(const Sum<T>& sum, int64_t start) {
    typedef typename Vector<T>::type V;
    constexpr int lanes = Vector<T>::lanes;
    V total[rows][width];
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < width; v++) total[m][v] = V{} + (sum.bias ? sum.bias[m] : T(0));
    for (int64_t d = 0; d < sum.depth; d++) {
        const T* source = sum.source + d * sum.source_step + start;
        const T* weight = sum.weight + d * sum.weight_step;
        for (const Tap& tap : sum.taps) {
            V met[width];
            for (int v = 0; v < width; v++) met[v] = *(const V*)(source + tap.source + v * lanes);
            for (int m = 0; m < rows; m++) {
                T factor = weight[m * sum.weight_apart + tap.weight];
                for (int v = 0; v < width; v++) total[m][v] += met[v] * factor;
            }
        }
    }
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < width; v++) *(V*)(sum.target + m * sum.target_apart + start + v * lanes) = total[m][v];
}

// A whole run. Its last vector may repeat a part of the one before; a run shorter than a vector goes value by value.
template <typename T, int rows>
void whole_run(const Sum<T>& sum, int64_t length) {
    constexpr int lanes = Vector<T>::lanes;
    int64_t start = 0;
    for (; start + 2 * lanes <= length; start += 2 * lanes) block<T, rows, 2>(sum, start);
    for (; start + lanes <= length; start += lanes) block<T, rows, 1>(sum, start);
    if (start == length) return;
    if (length >= lanes) return block<T, rows, 1>(sum, length - lanes);
    for (int m = 0; m < rows; m++)
        for (int64_t i = 0; i < length; i++) {
            T total = sum.bias ? sum.bias[m] : T(0);
            for (int64_t d = 0; d < sum.depth; d++)
                for (const Tap& tap : sum.taps)
                    total += sum.weight[m * sum.weight_apart + d * sum.weight_step + tap.weight] *
                             sum.source[d * sum.source_step + tap.source + i];
            sum.target[m * sum.target_apart + i] = total;
        }
}

// All channels of the target, in blocks that suit the number of registers.
template <typename T>
void all_channels(Sum<T> sum, int64_t channels, int64_t length) {
    while (channels > 0) {
        int64_t rows = channels % 4 == 0 ? 4 : channels >= 6 ? 6 : channels < 4 ? channels : 4;
        switch (rows) {
            case 6: whole_run<T, 6>(sum, length); break;
            case 4: whole_run<T, 4>(sum, length); break;
            case 3: whole_run<T, 3>(sum, length); break;
            case 2: whole_run<T, 2>(sum, length); break;
            default: whole_run<T, 1>(sum, length);
        }
        channels -= rows;
        sum.weight += rows * sum.weight_apart;
        sum.target += rows * sum.target_apart;
        if (sum.bias) sum.bias += rows;
    }
}

// Images of one side of a convolution.
struct Side {
    int64_t channels, height, width;
};

// target[g, m, y, x] = bias[g, m] + the sum of weight * source over all that meets it. Weights lie as (group, channel of
// the target, channel of the source, point) or with the two channels exchanged, as the steps say.
template <typename T>
void correlate(const T* source, Side from, T* target, Side to, const T* weight, int64_t weight_apart,
               int64_t weight_step, const T* bias, const Meetings& lines, const Meetings& columns, const Sizes& sizes,
               int threads) {
    const int64_t batch = sizes.batch, plane = from.height * from.width * batch, area = to.height * to.width * batch;
    const int64_t weights = sizes.outputs * sizes.channels * sizes.points();
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1)
    for (int64_t g = 0; g < sizes.groups; g++)
        for (int64_t y = 0; y < to.height; y++) {
            std::vector<Tap> taps;
            for (int64_t x = 0, length; x < to.width; x += length) {
                length = run_length(columns, x);
                taps.clear();
                for (const Meeting& line : lines[y])
                    for (const Meeting& column : columns[x])
                        taps.push_back({line.point * sizes.kernel_width + column.point,
                                        (line.place * from.width + column.place) * batch});
                all_channels(Sum<T>{source + g * from.channels * plane, weight + g * weights,
                                    bias ? bias + g * to.channels : nullptr,
                                    target + g * to.channels * area + (y * to.width + x) * batch, taps, from.channels,
                                    plane, weight_step, weight_apart, area},
                             to.channels, length * batch);
            }
        }
}

// Images of one group with their padding.
template <typename T>
void pad(const T* images, T* padded, const Sizes& s, int64_t height, int64_t width) {
    for (int64_t c = 0; c < s.channels; c++)
        for (int64_t y = 0; y < s.height && y + s.above < height; y++) {
            const T* from = images + (c * s.height + y) * s.width * s.batch;
            T* to = padded + ((c * height + y + s.above) * width + s.before) * s.batch;
            for (int64_t i = 0; i < s.width * s.batch; i++) to[i] = from[i];
        }
}

// The last vector of a run, zeros in the place of all but its last `count` values; a shorter run ends with the vector.
template <typename T>
inline typename Vector<T>::type last_of(const T* values, int64_t length, int64_t count) {
    typedef typename Vector<T>::type V;
    constexpr int lanes = Vector<T>::lanes;
    V last = {};
    if (length >= lanes) {
        last = *(const V*)(values + length - lanes);
        for (int i = 0; i < lanes; i++) last[i] = i < lanes - count ? T(0) : last[i];
    } else {
        for (int64_t i = 0; i < length; i++) last[lanes - length + i] = values[i];
    }
    return last;
}

// Products of `outputs` gradients with what `taps` points meet, added up lane by lane along a run.
template <typename T, int outputs, int taps>
inline void accumulate(const T* grad, int64_t grad_apart, const T* images, const int64_t* offsets, int64_t length,
                       typename Vector<T>::type* sums, int64_t apart) {
    typedef typename Vector<T>::type V;
    constexpr int lanes = Vector<T>::lanes;
    V total[outputs][taps], came[outputs];
    for (int o = 0; o < outputs; o++)
        for (int t = 0; t < taps; t++) total[o][t] = sums[o * apart + t];
    int64_t i = 0;
    for (; i + lanes <= length; i += lanes) {
        for (int o = 0; o < outputs; o++) came[o] = *(const V*)(grad + o * grad_apart + i);
        for (int t = 0; t < taps; t++) {
            V met = *(const V*)(images + offsets[t] + i);
            for (int o = 0; o < outputs; o++) total[o][t] += came[o] * met;
        }
    }
    if (i < length) {
        for (int o = 0; o < outputs; o++) came[o] = last_of(grad + o * grad_apart, length, length - i);
        for (int t = 0; t < taps; t++) {
            V met = last_of(images + offsets[t], length, lanes);
            for (int o = 0; o < outputs; o++) total[o][t] += came[o] * met;
        }
    }
    for (int o = 0; o < outputs; o++)
        for (int t = 0; t < taps; t++) sums[o * apart + t] = total[o][t];
}

template <typename T, int outputs, int taps>
void accumulate_all(const T* grad, int64_t grad_apart, const T* images, const std::vector<int64_t>& offsets,
                    int64_t length, typename Vector<T>::type* sums, int64_t total_outputs) {
    const int64_t apart = offsets.size();
    for (int64_t o = 0; o < total_outputs; o += outputs) {
        const T* own = grad + o * grad_apart;
        int64_t t = 0;
        for (; t + taps <= apart; t += taps)
            accumulate<T, outputs, taps>(own, grad_apart, images, &offsets[t], length, sums + o * apart + t, apart);
        for (; t < apart; t++)
            accumulate<T, outputs, 1>(own, grad_apart, images, &offsets[t], length, sums + o * apart + t, apart);
    }
}

template <typename T>
void weight_gradient(const T* grad, const T* images, T* result, const Sizes& s, int threads) {
    typedef typename Vector<T>::type V;
    constexpr int lanes = Vector<T>::lanes;
    const int64_t height = (s.out_height - 1) * s.down + (s.kernel_height - 1) * s.dilation_height + 1;
    const int64_t reach = (s.out_width - 1) * s.right + (s.kernel_width - 1) * s.dilation_width + 1;
    const int64_t width = reach > s.before + s.width ? reach : s.before + s.width;
    const int64_t taps = s.channels * s.points(), plane = s.height * s.width * s.batch;
    const bool padded = s.above > 0 || s.before > 0 || height > s.height || width > s.width;
    const int64_t tall = padded ? height : s.height;
    const int64_t area = s.out_height * s.out_width * s.batch;
    std::vector<int64_t> offsets;
    for (int64_t c = 0; c < s.channels; c++)
        for (int64_t i = 0; i < s.kernel_height; i++)
            for (int64_t j = 0; j < s.kernel_width; j++)
                offsets.push_back(((c * tall + i * s.dilation_height) * width + j * s.dilation_width) * s.batch);
    // Columns that are neighbours in the image too make one run of a line.
    const int64_t runs = s.right == 1 ? 1 : s.out_width, length = s.right == 1 ? s.out_width * s.batch : s.batch;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t g = 0; g < s.groups; g++) {
        std::vector<T> copy(padded ? s.channels * tall * width * s.batch : 0);
        const T* own = images + g * s.channels * plane;
        if (padded) {
            pad(own, copy.data(), s, tall, width);
            own = copy.data();
        }
        std::vector<T> values(s.outputs * taps * lanes);
        V* sums = (V*)values.data();
        for (int64_t y = 0; y < s.out_height; y++)
            for (int64_t run = 0; run < runs; run++) {
                const T* came = grad + g * s.outputs * area + y * s.out_width * s.batch + run * length;
                const T* met = own + (y * s.down * width + run * s.right) * s.batch;
                if (s.outputs % 3 == 0)
                    accumulate_all<T, 3, 4>(came, area, met, offsets, length, sums, s.outputs);
                else if (s.outputs % 2 == 0)
                    accumulate_all<T, 2, 6>(came, area, met, offsets, length, sums, s.outputs);
                else
                    accumulate_all<T, 1, 8>(came, area, met, offsets, length, sums, s.outputs);
            }
        for (int64_t i = 0; i < s.outputs * taps; i++) {
            T total = 0;
            for (int lane = 0; lane < lanes; lane++) total += values[i * lanes + lane];
            result[g * s.outputs * taps + i] = total;
        }
    }
}

template <typename T>
void convolution(const T* images, const T* weight, const T* bias, T* result, const Sizes& s, int threads) {
    correlate<T>(images, {s.channels, s.height, s.width}, result, {s.outputs, s.out_height, s.out_width}, weight,
                 s.channels * s.points(), s.points(), bias,
                 forward_meetings(s.out_height, s.height, s.kernel_height, s.down, s.above, s.dilation_height),
                 forward_meetings(s.out_width, s.width, s.kernel_width, s.right, s.before, s.dilation_width), s,
                 threads);
}

template <typename T>
void input_gradient(const T* grad, const T* weight, T* result, const Sizes& s, int threads) {
    correlate<T>(grad, {s.outputs, s.out_height, s.out_width}, result, {s.channels, s.height, s.width}, weight,
                 s.points(), s.channels * s.points(), nullptr,
                 backward_meetings(s.height, s.out_height, s.kernel_height, s.down, s.above, s.dilation_height),
                 backward_meetings(s.width, s.out_width, s.kernel_width, s.right, s.before, s.dilation_width), s,
                 threads);
}

typedef Vector<float>::type Floats;
typedef int32_t Ints __attribute__((vector_size(32)));

// tanh to about two units in the last place; what is not a number stays so.
inline Floats tangent(Floats x) {
    const Ints sign = (Ints)x & INT32_MIN;
    Floats size = (Floats)((Ints)x & INT32_MAX);
    const Floats end = Floats{} + 9.02f;  // 1 in single precision from here on
    size = size > end ? end : size;
    // Near 0: x + x z P(z), z = x^2, P fitted to (tanh(x) / x - 1) / z.
    const Floats z = size * size;
    Floats p = z * 2.495379559e-03f - 8.504769608e-03f;
    p = p * z + 2.181326113e-02f;
    p = p * z - 5.396419828e-02f;
    p = p * z + 1.333332253e-01f;
    p = p * z - 3.333333329e-01f;
    const Floats near = size + size * z * p;
    // Elsewhere: 1 - 2 / (exp(2x) + 1), with exp(2x) = 2^n exp(r), |r| <= ln(2) / 2, by its series.
    const Floats magic = Floats{} + 12582912.0f;  // what is added to it is rounded to a whole number
    const Floats twice = size + size, shifted = twice * 1.44269504f + magic, n = shifted - magic;
    const Floats r = (twice - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats e = r * (1.0f / 5040) + 1.0f / 720;
    e = e * r + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r + 1.0f;
    e = e * r + 1.0f;
    e = (Floats)((Ints)e + (((Ints)shifted - (Ints)magic) << 23));
    const Floats far = 1.0f - 2.0f / (e + 1.0f);
    const Floats found = (Floats)((Ints)(size < 0.55f ? near : far) | sign);
    return x == x ? found : x;
}

}  // namespace

extern "C" {

void convolution_f32(const float* x, const float* w, const float* b, float* y, const Sizes* s, int threads) {
    convolution(x, w, b, y, *s, threads);
}
void convolution_f64(const double* x, const double* w, const double* b, double* y, const Sizes* s, int threads) {
    convolution(x, w, b, y, *s, threads);
}
void by_input_f32(const float* grad, const float* w, float* dx, const Sizes* s, int threads) {
    input_gradient(grad, w, dx, *s, threads);
}
void by_input_f64(const double* grad, const double* w, double* dx, const Sizes* s, int threads) {
    input_gradient(grad, w, dx, *s, threads);
}
void by_weight_f32(const float* grad, const float* x, float* dw, const Sizes* s, int threads) {
    weight_gradient(grad, x, dw, *s, threads);
}
void by_weight_f64(const double* grad, const double* x, double* dw, const Sizes* s, int threads) {
    weight_gradient(grad, x, dw, *s, threads);
}
void tanh_f32(const float* x, float* y, int64_t length, int threads) {
    const int64_t whole = length / 8;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < whole; i++) *(Floats*)(y + 8 * i) = tangent(*(const Floats*)(x + 8 * i));
    Floats rest = {};
    for (int64_t i = 8 * whole; i < length; i++) rest[i - 8 * whole] = x[i];
    rest = tangent(rest);
    for (int64_t i = 8 * whole; i < length; i++) y[i] = rest[i - 8 * whole];
}

}

// cuBLASLt on a CPU, so that tests need no GPU: the part of its C API that mpipar calls,
// by plain loops over host memory. It refuses what the real one would: layouts that do
// not fit each other, types and epilogues that do not go together, addresses that are
// less aligned than was said, algorithms of another product, and a workspace that is
// too small.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <vector>

namespace {

enum Status { OK = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum Type { R_32F = 0, R_64F = 1, R_16F = 2, R_16BF = 14 };
enum Epilogue { DEFAULT = 1, BIAS = 4, GELU_AUX = 160, GELU_AUX_BIAS = 164, DGELU = 192 };

struct Layout {
    int type;
    uint64_t rows, cols;
    int64_t ld;
};
struct Desc {
    int compute, scale, transa = 0, transb = 0, bias_type = -1;
    uint32_t epilogue = DEFAULT;
    int64_t aux_ld = 0;
    char *bias = nullptr, *aux = nullptr;
    bool has_bias() const { return epilogue == BIAS || epilogue == GELU_AUX_BIAS; }
    bool has_aux() const { return epilogue != DEFAULT && epilogue != BIAS; }
};
struct Preference {
    uint64_t workspace = 0;
    uint32_t schemes = 7, alignment[4] = {256, 256, 256, 256};
};
struct Result {  // cublasLtMatmulHeuristicResult_t
    uint64_t algo[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
struct Handle {
    int dummy;
};

// --- numbers ------------------------------------------------------------------------

size_t size_of(int type) { return type == R_64F ? 8 : type == R_32F ? 4 : 2; }

double get(const char* at, int type, int64_t i) {
    if (type == R_64F) return reinterpret_cast<const double*>(at)[i];
    if (type == R_32F) return reinterpret_cast<const float*>(at)[i];
    if (type == R_16F) return reinterpret_cast<const _Float16*>(at)[i];
    const uint32_t bits = uint32_t(reinterpret_cast<const uint16_t*>(at)[i]) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

void put(char* at, int type, int64_t i, double value) {
    const float x = value;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    if (type == R_64F) reinterpret_cast<double*>(at)[i] = value;
    if (type == R_32F) reinterpret_cast<float*>(at)[i] = x;
    if (type == R_16F) reinterpret_cast<_Float16*>(at)[i] = x;
    if (type == R_16BF) reinterpret_cast<uint16_t*>(at)[i] = x == x ? rounded : 0x7fc0;
}

const double SCALE = 0.79788456080286536, CUBIC = 0.044715;
double gelu(double x) { return 0.5 * x * (1 + tanh(SCALE * (x + CUBIC * x * x * x))); }
double slope(double x) {
    const double t = tanh(SCALE * (x + CUBIC * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * SCALE * (1 + 3 * CUBIC * x * x);
}

// --- what goes together -------------------------------------------------------------

// op(A) (m, k), op(B) (k, n)
struct Problem {
    const Desc* desc;
    const Layout *a, *b, *c, *d;
    int64_t m() const { return desc->transa ? a->cols : a->rows; }
    int64_t k() const { return desc->transa ? a->rows : a->cols; }
    int64_t n() const { return desc->transb ? b->rows : b->cols; }

    Status check() const {
        if (!desc || !a || !b || !c || !d) return INVALID_VALUE;
        for (const Layout* x : {a, b, c, d})
            if (!x->rows || !x->cols || x->ld < int64_t(x->rows)) return INVALID_VALUE;
        const int64_t depth = desc->transb ? b->cols : b->rows;
        if (depth != k()) return INVALID_VALUE;
        for (const Layout* x : {c, d})
            if (int64_t(x->rows) != m() || int64_t(x->cols) != n()) return INVALID_VALUE;
        return types();
    }
    Status types() const {
        if (a->type != b->type || c->type != d->type) return NOT_SUPPORTED;
        const bool narrow = a->type == R_16F || a->type == R_16BF;
        if (desc->compute == 70) {  // COMPUTE_64F has no epilogues.
            if (desc->scale != R_64F) return NOT_SUPPORTED;
            if (a->type != R_64F || d->type != R_64F) return NOT_SUPPORTED;
            return desc->epilogue == DEFAULT ? OK : NOT_SUPPORTED;
        }
        if (desc->compute != 68 || desc->scale != R_32F) return NOT_SUPPORTED;
        if (a->type == R_64F || d->type == R_64F) return NOT_SUPPORTED;
        if (d->type != R_32F && d->type != a->type) return NOT_SUPPORTED;
        if (!narrow && a->type != R_32F) return NOT_SUPPORTED;
        return epilogue();
    }
    Status epilogue() const {
        switch (desc->epilogue) {
            case DEFAULT: case BIAS: case GELU_AUX: case GELU_AUX_BIAS: case DGELU: break;
            default: return NOT_SUPPORTED;
        }
        if (desc->has_bias()) {
            if (!desc->bias) return INVALID_VALUE;
            if (desc->bias_type != -1 && desc->bias_type != d->type) return NOT_SUPPORTED;
        }
        if (desc->has_aux()) {
            if (!desc->aux || desc->aux_ld < m() || desc->aux_ld % 8) return INVALID_VALUE;
            if (size_of(d->type) != 2) return NOT_SUPPORTED;
        }
        return OK;
    }
    // What an algorithm is made for
    uint64_t mark() const {
        uint64_t sum = 1469598103934665603ull;
        auto add = [&](uint64_t x) { sum = (sum ^ x) * 1099511628211ull; };
        for (const Layout* x : {a, b, c, d})
            add(x->type), add(x->rows), add(x->cols), add(x->ld);
        add(desc->compute), add(desc->scale), add(desc->transa), add(desc->transb);
        add(desc->epilogue), add(desc->aux_ld), add(desc->bias_type);
        return sum;
    }
};

void multiply(Desc desc, Layout la, Layout lb, Layout lc, Layout ld, double alpha,
              const char* a, const char* b, double beta, const char* c, char* d) {
    const Problem p = {&desc, &la, &lb, &lc, &ld};
    const int64_t m = p.m(), n = p.n(), k = p.k();
    std::vector<double> rows(m * k), column(k);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t l = 0; l < k; ++l)
            rows[i * k + l] = get(a, la.type, desc.transa ? i * la.ld + l : l * la.ld + i);
    for (int64_t j = 0; j < n; ++j) {
        for (int64_t l = 0; l < k; ++l)
            column[l] = get(b, lb.type, desc.transb ? l * lb.ld + j : j * lb.ld + l);
        for (int64_t i = 0; i < m; ++i) {
            double sum = 0;
            for (int64_t l = 0; l < k; ++l) sum += rows[i * k + l] * column[l];
            sum *= alpha;
            if (beta != 0) sum += beta * get(c, lc.type, j * lc.ld + i);
            if (desc.has_bias()) sum += get(desc.bias, ld.type, i);
            const int64_t at = j * desc.aux_ld + i;
            if (desc.epilogue == GELU_AUX || desc.epilogue == GELU_AUX_BIAS) {
                put(desc.aux, ld.type, at, sum);
                sum = gelu(sum);
            }
            if (desc.epilogue == DGELU) sum *= slope(get(desc.aux, ld.type, at));
            put(d, ld.type, j * ld.ld + i, sum);
        }
    }
}

// Who does the work later, if anybody; and work that waits
void (*defer)(void* stream, void* work);

template <class T> int set(T& field, const void* value, size_t size) {
    if (size != sizeof(T)) return INVALID_VALUE;
    memcpy(&field, value, size);
    return OK;
}

bool aligned(const void* at, uint64_t bytes) { return uintptr_t(at) % bytes == 0; }

}  // namespace

extern "C" {

// The emulated CuPy does the work in the order of its streams, and what it records more
// than once: so it is never deleted.
void shim_defer(void (*submit)(void*, void*)) { defer = submit; }
void shim_work(void* work) { (*static_cast<std::function<void()>*>(work))(); }

size_t cublasLtGetVersion() { return 130000; }
const char* cublasLtGetStatusName(int status) {
    return status == OK              ? "CUBLAS_STATUS_SUCCESS"
           : status == INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE"
                                     : "CUBLAS_STATUS_NOT_SUPPORTED";
}

int cublasLtCreate(Handle** handle) { return *handle = new Handle(), OK; }

int cublasLtMatrixLayoutCreate(Layout** made, int type, uint64_t rows, uint64_t cols,
                               int64_t ld) {
    return *made = new Layout{type, rows, cols, ld}, OK;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) { return delete layout, OK; }

int cublasLtMatmulDescCreate(Desc** made, int compute, int scale) {
    return *made = new Desc{compute, scale}, OK;
}
int cublasLtMatmulDescDestroy(Desc* desc) { return delete desc, OK; }
int cublasLtMatmulDescSetAttribute(Desc* desc, int attribute, const void* value,
                                   size_t size) {
    if (!desc || !value) return INVALID_VALUE;
    switch (attribute) {
        case 3: return set(desc->transa, value, size);
        case 4: return set(desc->transb, value, size);
        case 7: return set(desc->epilogue, value, size);
        case 8: return set(desc->bias, value, size);
        case 11: return set(desc->aux, value, size);
        case 12: return set(desc->aux_ld, value, size);
        case 26: return set(desc->bias_type, value, size);
    }
    return INVALID_VALUE;
}

int cublasLtMatmulPreferenceCreate(Preference** made) {
    return *made = new Preference(), OK;
}
int cublasLtMatmulPreferenceDestroy(Preference* preference) {
    return delete preference, OK;
}
int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute,
                                         const void* value, size_t size) {
    if (!preference || !value) return INVALID_VALUE;
    if (attribute == 1) return set(preference->workspace, value, size);
    if (attribute == 3) return set(preference->schemes, value, size);
    if (attribute < 5 || attribute > 8) return INVALID_VALUE;
    return set(preference->alignment[attribute - 5], value, size);
}

// Algorithms: number, mark of the product, alignment of A to D, of bias and of aux. The
// second one needs the whole workspace; there is none for addresses of 16-bit numbers
// that are aligned to them only.
int cublasLtMatmulAlgoGetHeuristic(Handle* handle, Desc* desc, Layout* a, Layout* b,
                                   Layout* c, Layout* d, Preference* preference,
                                   int wanted, Result* found, int* count) {
    *count = 0;
    if (!handle || !preference || wanted <= 0) return INVALID_VALUE;
    const Problem problem = {desc, a, b, c, d};
    if (Status status = problem.check()) return status;
    const uint32_t* align = preference->alignment;
    const Layout* layouts[] = {a, b, c, d};
    for (int i = 0; i < 4; ++i)
        if (align[i] % size_of(layouts[i]->type)) return INVALID_VALUE;
    // Partial sums of 16-bit results are to be added in the compute type.
    if (size_of(d->type) == 2 && preference->schemes != 2) return NOT_SUPPORTED;
    for (int i = 0; i < (wanted < 3 ? wanted : 3); ++i) {
        Result& result = found[i];
        memset(&result, 0, sizeof(result));
        result.algo[0] = i + 1;
        result.algo[1] = problem.mark();
        for (int j = 0; j < 4; ++j) result.algo[2 + j] = align[j];
        result.workspace = i == 1 ? preference->workspace : 0;
        ++*count;
    }
    return OK;
}

int cublasLtMatmul(Handle* handle, Desc* desc, const void* alpha, const char* a,
                   Layout* la, const char* b, Layout* lb, const void* beta,
                   const char* c, Layout* lc, char* d, Layout* ld, const uint64_t* algo,
                   void* workspace, size_t bytes, void* stream) {
    const Problem problem = {desc, la, lb, lc, ld};
    if (!handle || !alpha || !beta || !a || !b || !c || !d || !algo)
        return INVALID_VALUE;
    if (Status status = problem.check()) return status;
    if (algo[1] != problem.mark()) return INVALID_VALUE;
    const void* places[] = {a, b, c, d};
    for (int i = 0; i < 4; ++i)
        if (!aligned(places[i], algo[2 + i])) return INVALID_VALUE;
    if (desc->has_bias() && !aligned(desc->bias, 16)) return INVALID_VALUE;
    if (desc->has_aux() && !aligned(desc->aux, algo[5])) return INVALID_VALUE;
    if (!workspace || !aligned(workspace, 256)) return INVALID_VALUE;
    if (algo[0] == 2 && bytes < (4 << 20)) return INVALID_VALUE;
    // In place, C and D are the same matrix.
    if (c == d && lc->ld != ld->ld) return INVALID_VALUE;
    const bool is_double = desc->scale == R_64F;
    auto number = [&](const void* at) {
        return is_double ? *static_cast<const double*>(at)
                         : double(*static_cast<const float*>(at));
    };
    auto work = std::bind(multiply, *desc, *la, *lb, *lc, *ld, number(alpha), a, b,
                          number(beta), c, d);
    if (defer)
        defer(stream, new std::function<void()>(work));
    else
        work();
    return OK;
}

}  // extern "C"

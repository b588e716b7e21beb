// An env client for PlugRL wire protocol version 1 in one header: C++17, the standard library, POSIX sockets.
//
// Derive from plugrl::Env (spec, reset, step), then call plugrl::run. docs/cpp-client.md is the manual, docs/protocol.md
// the protocol, whose clauses the numbers in brackets quote. Linux and macOS; no TLS (wss://), no Windows.
//
// One thread does everything: pings are answered while the client waits, not while an env steps, which the protocol
// allows. Nothing is printed: errors are exceptions (section 1), news goes to Options::log. Every function may throw
// plugrl::Error unless it is noexcept.
//
//   1 Errors            5 Values: arrays, msgpack's types     9 The connection: socket, handshake, ping and close
//   2 Text              6 Writing msgpack                    10 Environments: what an author implements
//   3 SHA-1, base64     7 Reading msgpack                    11 The session: who may say what when
//   4 Dtypes            8 WebSocket frames                   12 The batch of envs   13 The client
#ifndef PLUGRL_CLIENT_HPP
#define PLUGRL_CLIENT_HPP

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace plugrl {

constexpr const char* client_version = "0.1.0";
using Bytes = std::vector<std::uint8_t>;
using Shape = std::vector<std::int64_t>;

// === 1 Errors ========================================================================================================
// Error
//   UsageError         an option, a spec or an observation of ours is unusable
//   HandshakeError     the connection did not open; `status` is the HTTP status, 0 without one
//   ConnectTimeout     there was no server for Options::connect_timeout seconds
//   ConnectionClosed   an open connection ended; `code` 1006 stands for "without a close frame"
//   ProtocolError      the server broke the protocol; `clause` says which rule, 7.4 is a text frame
//   EnvFailed          an env threw; the exception is nested in this one (std::rethrow_if_nested)

class Error : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

class UsageError : public Error {
    using Error::Error;
};

class HandshakeError : public Error {
public:
    explicit HandshakeError(const std::string& text, int http_status = 0) : Error(text), status(http_status) {}
    int status;
};

class ConnectTimeout : public Error {
    using Error::Error;
};

class ConnectionClosed : public Error {
public:
    ConnectionClosed(int close_code, std::string close_reason, const std::string& detail)
        : Error("the connection ended: " + detail), code(close_code), reason(std::move(close_reason)) {}
    int code;
    std::string reason;
};

class ProtocolError : public Error {
public:
    ProtocolError(const std::string& broken_clause, const std::string& text, int code_to_close_with = 1002)
        : Error("[" + broken_clause + "] " + text), clause(broken_clause), close_code(code_to_close_with) {}
    std::string clause;
    int close_code;
};

class EnvFailed : public Error {
    using Error::Error;
};

// === 2 Text ==========================================================================================================

// Decode UTF-8; false if it is none (surrogates, overlong forms, beyond U+10FFFF). `out` may be null.
inline bool decode_utf8(std::string_view in, std::u32string* out) {
    for (std::size_t at = 0; at < in.size();) {
        const auto head = static_cast<std::uint8_t>(in[at]);
        const std::size_t length = head < 0x80 ? 1 : head < 0xC2 ? 0 : head < 0xE0 ? 2 : head < 0xF0 ? 3 : head < 0xF5 ? 4 : 0;
        if (length == 0 || length > in.size() - at) return false;
        std::uint32_t point = length == 1 ? head : head & (0x7FU >> length);
        for (std::size_t i = 1; i < length; ++i) {
            const auto next = static_cast<std::uint8_t>(in[at + i]);
            if ((next & 0xC0) != 0x80) return false;
            point = point << 6 | (next & 0x3FU);
        }
        if ((length == 3 && point < 0x800) || (length == 4 && point < 0x10000)) return false;
        if (point > 0x10FFFF || (point >= 0xD800 && point < 0xE000)) return false;
        if (out != nullptr) out->push_back(static_cast<char32_t>(point));
        at += length;
    }
    return true;
}

// Quote what a peer sent for an error text: short, and printable.
inline std::string quoted(std::string_view text) {
    std::string out = "'";
    for (const char c : text.substr(0, 60)) out += c >= ' ' && c <= '~' ? c : '?';
    return out + "'";
}

// === 3 SHA-1 and base64, for the handshake of RFC 6455 ===============================================================

inline std::array<std::uint8_t, 20> sha1(std::string_view text) {
    std::array<std::uint32_t, 5> state = {0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0};
    const auto rotate = [](std::uint32_t x, unsigned by) { return x << by | x >> (32 - by); };
    std::string padded(text);
    padded += static_cast<char>(0x80);
    while (padded.size() % 64 != 56) padded += '\0';
    for (unsigned shift = 64; shift > 0; shift -= 8)
        padded += static_cast<char>(static_cast<std::uint64_t>(text.size()) * 8 >> (shift - 8) & 0xFF);
    for (std::size_t block = 0; block < padded.size(); block += 64) {
        std::array<std::uint32_t, 80> w{};
        for (std::size_t i = 0; i < 64; ++i) w[i / 4] = w[i / 4] << 8 | static_cast<std::uint8_t>(padded[block + i]);
        for (std::size_t i = 16; i < 80; ++i) w[i] = rotate(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 1);
        auto [a, b, c, d, e] = state;
        for (std::size_t i = 0; i < 80; ++i) {
            const std::uint32_t mixed = i < 20   ? ((b & c) | (~b & d)) + 0x5A827999
                                        : i < 40 ? (b ^ c ^ d) + 0x6ED9EBA1
                                        : i < 60 ? ((b & c) | (b & d) | (c & d)) + 0x8F1BBCDC
                                                 : (b ^ c ^ d) + 0xCA62C1D6;
            const std::uint32_t next = rotate(a, 5) + mixed + e + w[i];
            e = d, d = c, c = rotate(b, 30), b = a, a = next;
        }
        state = {state[0] + a, state[1] + b, state[2] + c, state[3] + d, state[4] + e};
    }
    std::array<std::uint8_t, 20> digest{};
    for (std::size_t i = 0; i < 20; ++i) digest[i] = static_cast<std::uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
}

inline std::string base64(const std::uint8_t* data, std::size_t size) {
    const char* letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    for (std::size_t at = 0; at < size; at += 3) {
        const std::size_t left = std::min<std::size_t>(3, size - at);
        std::uint32_t bits = 0;
        for (std::size_t i = 0; i < 3; ++i) bits = bits << 8 | (i < left ? data[at + i] : 0U);
        for (std::size_t i = 0; i < 4; ++i) out += i <= left ? letters[bits >> (18 - 6 * i) & 63] : '=';
    }
    return out;
}

// What a server answers to a Sec-WebSocket-Key.
inline std::string accept_of(const std::string& key) {
    const auto digest = sha1(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    return base64(digest.data(), digest.size());
}

// === 4 Dtypes [3] ====================================================================================================

// A numpy typestr: byte order `<`, `>` or `|`; kind b, i, u, f or U; bytes per item.
struct Dtype {
    char order = '|';
    char kind = 'u';
    std::uint32_t size = 1;

    // The dtype of a C++ type, in this machine's byte order.
    template <class T>
    static Dtype of() {
        static_assert(std::is_arithmetic_v<T> && sizeof(T) <= 8, "the wire carries bool, ints, float and double");
        constexpr char kind = std::is_same_v<T, bool> ? 'b' : std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
        return {sizeof(T) == 1 ? '|' : native(), kind, sizeof(T)};
    }

    static Dtype parse(std::string_view typestr) {
        Dtype found;
        std::uint32_t size = 0;
        bool good = typestr.size() >= 3 && typestr.size() <= 8 && typestr[2] != '0';
        for (std::size_t i = 2; good && i < typestr.size(); ++i) {
            good = typestr[i] >= '0' && typestr[i] <= '9';
            size = size * 10 + static_cast<std::uint32_t>(typestr[i] - '0');
        }
        if (good) {
            found.order = typestr[0], found.kind = typestr[1];
            const bool pairs = size == 2 || size == 4 || size == 8;
            good = (found.order == '<' || found.order == '>' || (found.order == '|' && size == 1 && found.kind != 'U')) &&
                   ((found.kind == 'b' && size == 1) || ((found.kind == 'i' || found.kind == 'u') && (size == 1 || pairs)) ||
                    (found.kind == 'f' && pairs) || found.kind == 'U');
            found.size = found.kind == 'U' ? 4 * size : size;
        }
        if (!good)
            throw ProtocolError("3", "dtype " + quoted(typestr) + " is refused: expected a byte order (<, > or |), a kind of b, i, u, f or U, a size");
        return found;
    }

    std::string str() const { return {std::string{order, kind} + std::to_string(kind == 'U' ? size / 4 : size)}; }
    bool is_int() const { return kind == 'i' || kind == 'u'; }
    bool is_number() const { return is_int() || kind == 'f' || kind == 'b'; }
    bool operator==(const Dtype& other) const { return order == other.order && kind == other.kind && size == other.size; }
    bool operator!=(const Dtype& other) const { return !(*this == other); }

    static char native() {
        const std::uint16_t probe = 1;
        std::uint8_t first = 0;
        std::memcpy(&first, &probe, 1);
        return first == 1 ? '<' : '>';
    }
};

// Read one number of at most 8 bytes as its bits.
inline std::uint64_t load_bits(const char* at, const Dtype& dtype) {
    std::uint64_t bits = 0;
    for (std::uint32_t i = 0; i < dtype.size; ++i)
        bits = bits << 8 | static_cast<std::uint8_t>(at[dtype.order == '>' ? i : dtype.size - 1 - i]);
    return bits;
}

// Read one number as a double: exact for every float, and for ints up to 2^53.
inline double load_real(const char* at, const Dtype& dtype) {
    const std::uint64_t bits = load_bits(at, dtype);
    if (dtype.kind == 'u') return static_cast<double>(bits);
    if (dtype.kind == 'b') return bits != 0 ? 1.0 : 0.0;
    if (dtype.kind == 'i') {
        const unsigned unused = 64 - 8 * dtype.size;
        return static_cast<double>(static_cast<std::int64_t>(bits << unused) >> unused);
    }
    if (dtype.size == 8) {
        double value = 0;
        std::memcpy(&value, &bits, 8);
        return value;
    }
    if (dtype.size == 4) {
        const auto narrow = static_cast<std::uint32_t>(bits);
        float value = 0;
        std::memcpy(&value, &narrow, 4);
        return static_cast<double>(value);
    }
    const int exponent = static_cast<int>(bits >> 10 & 31);
    const double fraction = static_cast<double>(bits & 1023);
    const double size = exponent == 31 ? (fraction > 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity())
                        : exponent == 0 ? std::ldexp(fraction, -24)
                                        : std::ldexp(fraction + 1024, exponent - 25);
    return (bits & 0x8000) != 0 ? -size : size;
}

// Read one number as an integer, floats rounded half to even; false if it has none in 64 bits.
inline bool load_integer(const char* at, const Dtype& dtype, std::int64_t& out) {
    if (dtype.kind == 'f') {
        const double value = std::nearbyint(load_real(at, dtype));
        if (!(value >= -9223372036854775808.0 && value < 9223372036854775808.0)) return false;
        out = static_cast<std::int64_t>(value);
        return true;
    }
    const std::uint64_t bits = load_bits(at, dtype);
    const unsigned unused = 64 - 8 * dtype.size;
    out = dtype.kind == 'i' ? static_cast<std::int64_t>(bits << unused) >> unused : static_cast<std::int64_t>(bits);
    return dtype.kind == 'i' || bits <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
}

// === 5 Values ========================================================================================================

// What msgpack carries, and arrays. Which members mean something depends on the kind.
struct Value {
    enum class Kind : std::uint8_t { nil, boolean, integer, natural, real, text, bytes, list, map, array, scalar };

    Kind kind = Kind::nil;
    Dtype dtype;              // array, scalar
    std::int64_t number = 0;  // boolean, integer; natural (above 2^63 - 1): the bits
    double real = 0;
    std::string text;          // text (UTF-8), bytes; array: its data in C order
    std::vector<Value> items;  // list; map: key, value, key, value …; scalar: its one number or text
    Shape shape;               // array

    static Value of(Kind kind, std::int64_t number = 0) {
        Value value;
        value.kind = kind, value.number = number;
        return value;
    }
    bool is(Kind wanted) const { return kind == wanted; }
    bool is_natural() const { return kind == Kind::natural || (kind == Kind::integer && number >= 0); }
    std::size_t rows() const { return shape.empty() ? 0 : static_cast<std::size_t>(shape[0]); }
    // Number of elements of an array.
    std::size_t count() const { return text.size() / dtype.size; }

    // Find the value of a map's str key; null if there is none, or if this is no map.
    const Value* find(std::string_view key, Kind key_kind = Kind::text) const {
        if (kind != Kind::map) return nullptr;
        for (std::size_t i = 0; i + 1 < items.size(); i += 2)
            if (items[i].kind == key_kind && items[i].text == key) return &items[i + 1];
        return nullptr;
    }

    // Say what it is, for an error text.
    std::string describe() const {
        static const char* const names[] = {"nil", "a bool", "an int", "an int", "a float", "a str", "a bin", "a list", "a map", "", "a numpy scalar"};
        if (kind != Kind::array) return names[static_cast<std::size_t>(kind)];
        std::string out = "an array " + dtype.str() + "[";
        for (std::size_t i = 0; i < shape.size() && i < 8; ++i) out += (i > 0 ? ", " : "") + std::to_string(shape[i]);
        return out + "]";
    }
};

// === 6 Writing msgpack [3] ===========================================================================================

constexpr int max_depth = 32;

// Append values to a buffer, in msgpack's shortest forms.
class Writer {
public:
    explicit Writer(Bytes& out) : out_(out) {}

    void nil() { out_.push_back(0xC0); }
    void boolean(bool value) { out_.push_back(value ? 0xC3 : 0xC2); }
    void integer(std::int64_t value) {
        if (value >= 0) return natural(static_cast<std::uint64_t>(value));
        const auto bits = static_cast<std::uint64_t>(value);
        if (value >= -32) return big_endian(bits, 1);
        const unsigned log = value >= -128 ? 0 : value >= -32768 ? 1 : value >= -2147483648LL ? 2 : 3;
        out_.push_back(static_cast<std::uint8_t>(0xD0 + log));
        big_endian(bits, 1U << log);
    }
    void natural(std::uint64_t value) {
        if (value < 128) return big_endian(value, 1);
        const unsigned log = value < 0x100 ? 0 : value < 0x10000 ? 1 : value < 0x100000000 ? 2 : 3;
        out_.push_back(static_cast<std::uint8_t>(0xCC + log));
        big_endian(value, 1U << log);
    }
    void real(double value) {
        std::uint64_t bits = 0;
        std::memcpy(&bits, &value, 8);
        out_.push_back(0xCB);
        big_endian(bits, 8);
    }
    void str(std::string_view text) {
        if (!decode_utf8(text, nullptr)) throw UsageError("a str that is no UTF-8: " + quoted(text));
        head(text.size(), 0xA0, 32, 0xD9);
        raw(text.data(), text.size());
    }
    void bin(std::string_view data) {
        head(data.size(), 0, 0, 0xC4);
        raw(data.data(), data.size());
    }
    void list(std::size_t count) { head(count, 0x90, 16, 0xDB); }
    void map(std::size_t count) { head(count, 0x80, 16, 0xDD); }
    void raw(const void* data, std::size_t size) {
        const auto* bytes = static_cast<const std::uint8_t*>(data);
        if (size > 0) out_.insert(out_.end(), bytes, bytes + size);
    }

    // An array in three parts: open it with the size of its data, append the data with `raw`, close it.
    void open_array(std::size_t bytes) {
        map(4);
        bin("__ndarray__");
        boolean(true);
        bin("data");
        head(bytes, 0, 0, 0xC4);
    }
    void close_array(const Dtype& dtype, std::size_t rows, const Shape& row_shape) {
        bin("dtype");
        str(dtype.str());
        bin("shape");
        list(row_shape.size() + 1);
        natural(rows);
        for (const std::int64_t extent : row_shape) integer(extent);
    }
    // One column [n] of a message.
    template <class T>
    void column(const std::vector<T>& values) {
        open_array(values.size() * sizeof(T));
        raw(values.data(), values.size() * sizeof(T));
        close_array(Dtype::of<T>(), values.size(), {});
    }
    void flags(const std::vector<std::uint8_t>& values) {
        open_array(values.size());
        raw(values.data(), values.size());
        close_array(Dtype::of<bool>(), values.size(), {});
    }

    void value(const Value& value, int depth = 0);

private:
    // `wide` is the head with a length of 8 bits; lists and maps have none, theirs stands where it would be.
    void head(std::size_t count, unsigned fix, std::size_t fix_below, unsigned wide) {
        if (count > 0xFFFFFFFF) throw UsageError("more than msgpack's 2^32 - 1 bytes or items");
        if (count < fix_below) return out_.push_back(static_cast<std::uint8_t>(fix + count));
        const unsigned log = count < 0x100 && wide < 0xDA ? 0 : count < 0x10000 ? 1 : 2;
        out_.push_back(static_cast<std::uint8_t>(wide + log));
        big_endian(count, 1U << log);
    }
    void big_endian(std::uint64_t bits, unsigned bytes) {
        for (unsigned i = bytes; i > 0; --i) out_.push_back(static_cast<std::uint8_t>(bits >> (8 * (i - 1))));
    }

    Bytes& out_;
};

inline void Writer::value(const Value& value, int depth) {
    using Kind = Value::Kind;
    if (depth >= max_depth && value.kind >= Kind::list) throw UsageError("nested deeper than 32 levels");
    switch (value.kind) {
        case Kind::nil: return nil();
        case Kind::boolean: return boolean(value.number != 0);
        case Kind::integer: return integer(value.number);
        case Kind::natural: return natural(static_cast<std::uint64_t>(value.number));
        case Kind::real: return real(value.real);
        case Kind::text: return str(value.text);
        case Kind::bytes: return bin(value.text);
        case Kind::list:
        case Kind::map:
            value.is(Kind::list) ? list(value.items.size()) : map(value.items.size() / 2);
            for (const Value& item : value.items) this->value(item, depth + 1);
            return;
        case Kind::array:
            open_array(value.text.size());
            raw(value.text.data(), value.text.size());
            bin("dtype");
            str(value.dtype.str());
            bin("shape");
            list(value.shape.size());
            for (const std::int64_t extent : value.shape) integer(extent);
            return;
        case Kind::scalar:
            map(3);
            bin("__npgeneric__");
            boolean(true);
            bin("data");
            this->value(value.items.at(0), depth + 1);
            bin("dtype");
            return str(value.dtype.str());
    }
}

inline Bytes encode(const Value& value) {
    Bytes out;
    Writer(out).value(value);
    return out;
}

// === 7 Reading msgpack [3] ===========================================================================================
// Everything a peer sends is bounded before it is believed: nesting, the number of items, every length.

constexpr std::size_t max_items = 1000000;

class Reader {
public:
    explicit Reader(std::string_view bytes) : bytes_(bytes) {}

    // Read the whole message as one value.
    Value message() {
        Value found = value(0);
        if (at_ != bytes_.size()) refuse(std::to_string(bytes_.size() - at_) + " bytes behind the value");
        return found;
    }

private:
    using Kind = Value::Kind;

    [[noreturn]] static void refuse(const std::string& text, const char* clause = "3") { throw ProtocolError(clause, text); }

    std::string_view take(std::size_t count) {
        if (count > bytes_.size() - at_)
            refuse(std::to_string(count) + " bytes announced at offset " + std::to_string(at_) + ", " + std::to_string(bytes_.size() - at_) + " left");
        at_ += count;
        return bytes_.substr(at_ - count, count);
    }
    std::uint64_t big_endian(std::size_t bytes) {
        std::uint64_t bits = 0;
        for (const char c : take(bytes)) bits = bits << 8 | static_cast<std::uint8_t>(c);
        return bits;
    }

    Value value(int depth) {
        const auto head = static_cast<std::uint8_t>(take(1)[0]);
        if (head < 0x80) return Value::of(Kind::integer, head);
        if (head < 0x90) return map(head & 0x0FU, depth);
        if (head < 0xA0) return list(head & 0x0FU, depth);
        if (head < 0xC0) return text(Kind::text, head & 0x1FU);
        if (head >= 0xE0) return Value::of(Kind::integer, head - 256);
        switch (head) {
            case 0xC0: return {};
            case 0xC2: return Value::of(Kind::boolean, 0);
            case 0xC3: return Value::of(Kind::boolean, 1);
            case 0xC4: case 0xC5: case 0xC6: return text(Kind::bytes, big_endian(1U << (head - 0xC4)));
            case 0xCA: case 0xCB: {
                Value found = Value::of(Kind::real);
                found.real = load_real(take(head == 0xCA ? 4 : 8).data(), {'>', 'f', head == 0xCA ? 4U : 8U});
                return found;
            }
            case 0xCC: case 0xCD: case 0xCE: case 0xCF: {
                const std::uint64_t bits = big_endian(1U << (head - 0xCC));
                return Value::of(bits >> 63 != 0 ? Kind::natural : Kind::integer, static_cast<std::int64_t>(bits));
            }
            case 0xD0: case 0xD1: case 0xD2: case 0xD3: {
                const unsigned size = 1U << (head - 0xD0), unused = 64 - 8 * size;
                return Value::of(Kind::integer, static_cast<std::int64_t>(big_endian(size) << unused) >> unused);
            }
            case 0xD9: case 0xDA: case 0xDB: return text(Kind::text, big_endian(1U << (head - 0xD9)));
            case 0xDC: case 0xDD: return list(big_endian(head == 0xDC ? 2 : 4), depth);
            case 0xDE: case 0xDF: return map(big_endian(head == 0xDE ? 2 : 4), depth);
            case 0xC1: refuse("byte 0xc1 is no msgpack");
            default: refuse("a msgpack ext type: arrays are maps with the bin keys __ndarray__, data, dtype, shape");
        }
    }

    Value text(Kind kind, std::uint64_t count) {
        Value found = Value::of(kind);
        found.text = take(count);
        if (kind == Kind::text && !decode_utf8(found.text, nullptr)) refuse("a str that is no UTF-8");
        return found;
    }

    // Count items when they are announced, so that a nest of them is bounded in sum; each takes one byte at least.
    void room(std::uint64_t count, int depth) {
        if (depth >= max_depth) refuse("nested deeper than 32 levels");
        if (count > bytes_.size() - at_) refuse(std::to_string(count) + " items announced, " + std::to_string(bytes_.size() - at_) + " bytes left");
        if ((items_ += count) > max_items) refuse("more than 1000000 items in one message");
    }
    Value list(std::uint64_t count, int depth) {
        room(count, depth);
        Value found = Value::of(Kind::list);
        found.items.reserve(count);
        for (std::uint64_t i = 0; i < count; ++i) found.items.push_back(value(depth + 1));
        return found;
    }
    Value map(std::uint64_t count, int depth) {
        room(2 * count, depth);
        Value found = Value::of(Kind::map);
        found.items.reserve(2 * count);
        std::set<std::pair<Kind, std::string_view>> seen;
        for (std::uint64_t i = 0; i < count; ++i) {
            Value key = value(depth + 1);
            if (!key.is(Kind::text) && !key.is(Kind::bytes)) refuse("map keys are str or bin, got " + key.describe());
            if (!seen.emplace(key.kind, bytes_.substr(at_ - key.text.size(), key.text.size())).second)
                refuse("map key " + quoted(key.text) + " stands twice");
            // An array is one level deep, its shape included.
            const bool is_shape = key.is(Kind::bytes) && key.text == "shape" && at_ < bytes_.size() && (bytes_[at_] & 0xF0) == 0x90;
            found.items.push_back(std::move(key));
            found.items.push_back(value(is_shape ? depth : depth + 1));
        }
        if (found.find("__ndarray__", Kind::bytes) != nullptr) return array(found);
        if (found.find("__npgeneric__", Kind::bytes) != nullptr) return scalar(found);
        const auto has = [&found](const char* a, const char* b, const char* c, Kind kind) {
            return found.find(a, kind) != nullptr && found.find(b, kind) != nullptr && found.find(c, kind) != nullptr;
        };
        if (has("nd", "type", "data", Kind::text) || has("nd", "type", "data", Kind::bytes) ||
            has("__ndarray__", "data", "dtype", Kind::text) || has("__npgeneric__", "data", "dtype", Kind::text))
            refuse("an array in another numpy dialect: expected the bin keys __ndarray__, data, dtype, shape");
        return found;
    }

    // Check the keys that arrays and scalars have in common, and give the dtype.
    static Dtype dtype_in(const Value& found, const char* mark, std::size_t keys) {
        const Value* marked = found.find(mark, Kind::bytes);
        const Value* dtype = found.find("dtype", Kind::bytes);
        if (!marked->is(Kind::boolean) || marked->number == 0) refuse(std::string(mark) + " is not true");
        if (found.items.size() != 2 * keys || found.find("data", Kind::bytes) == nullptr || dtype == nullptr)
            refuse("an array has the keys __ndarray__, data, dtype, shape, a scalar __npgeneric__, data, dtype; one is missing, or one is too many");
        if (!dtype->is(Kind::text) && !dtype->is(Kind::bytes)) refuse("a dtype must be a str such as '<f4', got " + dtype->describe());
        return Dtype::parse(dtype->text);
    }

    static Value array(Value& found) {
        Value out = Value::of(Kind::array);
        out.dtype = dtype_in(found, "__ndarray__", 4);
        const Value* shape = found.find("shape", Kind::bytes);
        auto* data = const_cast<Value*>(found.find("data", Kind::bytes));  // `found` is the caller's own, about to go
        if (shape == nullptr || !shape->is(Kind::list) || shape->items.size() > 32) refuse("a shape must be a list of at most 32 ints");
        if (!data->is(Kind::bytes)) refuse("an array's data must be bin, got " + data->describe());
        std::uint64_t product = out.dtype.size;  // as if no extent were 0: numpy cannot hold more either way
        bool empty = false;
        for (const Value& extent : shape->items) {
            if (!extent.is(Kind::integer) || extent.number < 0) refuse("a shape must hold non-negative ints, got " + extent.describe());
            const auto length = static_cast<std::uint64_t>(extent.number);
            empty = empty || length == 0;
            if (length > 0 && product > (std::uint64_t{1} << 62) / length) refuse("a shape that is too large");
            if (length > 0) product *= length;
            out.shape.push_back(extent.number);
        }
        out.text = std::move(data->text);
        if (out.text.size() != (empty ? 0 : product)) refuse(out.describe() + " has " + std::to_string(out.text.size()) + " bytes of data, expected " + std::to_string(empty ? 0 : product));
        if (out.dtype.kind == 'b')
            for (char& flag : out.text) flag = static_cast<char>(flag != 0);
        if (out.dtype.kind == 'U') {
            for (std::size_t at = 0; at < out.text.size(); at += 4) {
                const std::uint64_t point = load_bits(out.text.data() + at, {out.dtype.order, 'u', 4});
                if (point > 0x10FFFF || (point >= 0xD800 && point < 0xE000)) refuse("a text array holds what is no Unicode", "3.4");
            }
        }
        return out;
    }

    static Value scalar(Value& found) {
        Value out = Value::of(Kind::scalar);
        out.dtype = dtype_in(found, "__npgeneric__", 3);
        const Value& data = *found.find("data", Kind::bytes);
        const unsigned bits = 8 * out.dtype.size;
        bool good = false;
        if (out.dtype.kind == 'U') {
            std::u32string points;
            good = data.is(Kind::text) && decode_utf8(data.text, &points) && 4 * points.size() <= out.dtype.size;
        } else if (data.is(Kind::boolean)) {
            good = true;
        } else if (data.is(Kind::integer) || data.is(Kind::natural) || data.is(Kind::real)) {
            const double value = data.is(Kind::real) ? data.real : data.is(Kind::natural) ? static_cast<double>(static_cast<std::uint64_t>(data.number)) : static_cast<double>(data.number);
            const double above = out.dtype.kind == 'b' ? 2.0 : std::ldexp(1.0, static_cast<int>(out.dtype.kind == 'u' ? bits : bits - 1));
            if (out.dtype.kind == 'f')  // what rounds to infinity does not fit
                good = !std::isfinite(value) || bits == 64 || std::fabs(value) < (bits == 32 ? 3.4028235677973366e38 : 65520.0);
            else if (data.is(Kind::real) || bits < 64)
                good = value == std::trunc(value) && value < above && value >= (out.dtype.kind == 'i' ? -above : 0.0);
            else
                good = out.dtype.kind == 'u' ? data.is_natural() : data.is(Kind::integer);
        }
        if (!good) refuse("a numpy scalar of dtype " + out.dtype.str() + " whose value does not fit it, " + data.describe());
        out.items.push_back(data);
        return out;
    }

    std::string_view bytes_;
    std::size_t at_ = 0;
    std::uint64_t items_ = 0;
};

// Decode one message. Throws ProtocolError, whatever the bytes are.
inline Value decode(std::string_view bytes) { return Reader(bytes).message(); }

// === 8 WebSocket frames (RFC 6455) ===================================================================================

enum class Op : std::uint8_t { continuation = 0, text = 1, binary = 2, close = 8, ping = 9, pong = 10 };

// A whole message, or a control frame; `payload` is valid until the reader is touched again.
struct Event {
    Op op = Op::binary;
    std::string_view payload;
};

// Append one masked frame, as a client sends it.
inline void write_frame(Bytes& out, Op op, const void* payload, std::size_t size, std::uint32_t key) {
    out.push_back(static_cast<std::uint8_t>(0x80U | static_cast<unsigned>(op)));
    const unsigned wide = size < 126 ? 0 : size < 0x10000 ? 2 : 8;
    out.push_back(static_cast<std::uint8_t>(0x80U | (wide == 0 ? size : wide == 2 ? 126 : 127)));
    for (unsigned i = wide; i > 0; --i) out.push_back(static_cast<std::uint8_t>(static_cast<std::uint64_t>(size) >> (8 * (i - 1))));
    std::array<std::uint8_t, 8> mask{};
    std::memcpy(mask.data(), &key, 4);
    std::memcpy(mask.data() + 4, &key, 4);
    out.insert(out.end(), mask.begin(), mask.begin() + 4);
    std::size_t at = out.size();
    out.resize(at + size);
    const auto* bytes = static_cast<const std::uint8_t*>(payload);
    std::uint64_t mask_bits = 0, word = 0;
    std::memcpy(&mask_bits, mask.data(), 8);
    std::size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        std::memcpy(&word, bytes + i, 8);
        word ^= mask_bits;
        std::memcpy(out.data() + at + i, &word, 8);
    }
    for (; i < size; ++i) out[at + i] = static_cast<std::uint8_t>(bytes[i] ^ mask[i % 8]);
}

// Cut received bytes into events: ask `room` where to put them, tell `filled`, then call `next` until it is false.
class FrameReader {
public:
    explicit FrameReader(std::size_t max_message_bytes) : max_(max_message_bytes) {}

    // Give a place for received bytes, 64 KiB at least.
    std::pair<std::uint8_t*, std::size_t> room() {
        if (begin_ == end_) begin_ = end_ = 0;
        if (buffer_.size() - end_ < minimum && begin_ > 0) {
            std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
            end_ -= begin_, begin_ = 0;
        }
        if (buffer_.size() - end_ < minimum) buffer_.resize(std::max(2 * buffer_.size(), 2 * minimum));
        return {buffer_.data() + end_, buffer_.size() - end_};
    }
    void filled(std::size_t count) { end_ += count; }

    // Take the next event; false: more bytes are needed.
    bool next(Event& event) {
        if (whole_) message_.clear(), whole_ = false;
        while (true) {
            const std::uint8_t* head = buffer_.data() + begin_;
            const std::size_t there = end_ - begin_;
            if (there < 2) return false;
            const auto op = static_cast<Op>(head[0] & 15);
            const bool fin = (head[0] & 0x80) != 0, control = op >= Op::close;
            if ((head[0] & 0x70) != 0) refuse("a frame with reserved bits: no extension was agreed on");
            if ((head[1] & 0x80) != 0) refuse("a masked frame from a server");
            if (op > Op::pong || (op > Op::binary && op < Op::close)) refuse("a frame with the unknown opcode " + std::to_string(head[0] & 15));
            std::uint64_t size = head[1] & 127U;
            if (control && (!fin || size > 125)) refuse("a control frame that is fragmented or longer than 125 bytes");
            const std::size_t wide = size < 126 ? 0 : size == 126 ? 2 : 8;
            if (there < 2 + wide) return false;
            if (wide > 0) size = 0;
            for (std::size_t i = 0; i < wide; ++i) size = size << 8 | head[2 + i];
            if (!control) {
                if (fragments_ != (op == Op::continuation)) refuse(fragments_ ? "a new message inside a fragmented one" : "a continuation of nothing");
                if (size > max_ - message_.size()) throw ProtocolError("1", "a message of more than " + std::to_string(max_) + " bytes", 1009);
            }
            if (there - 2 - wide < size) return false;
            const std::string_view payload(reinterpret_cast<const char*>(head) + 2 + wide, static_cast<std::size_t>(size));
            begin_ += 2 + wide + payload.size();
            if (control || (fin && !fragments_)) {
                event = {op, payload};
                return true;
            }
            if (!fragments_) op_ = op;
            message_.append(payload);
            fragments_ = !fin;
            if (fin) {
                whole_ = true;
                event = {op_, message_};
                return true;
            }
        }
    }

private:
    static constexpr std::size_t minimum = 1 << 16;
    [[noreturn]] static void refuse(const std::string& text) { throw ProtocolError("1", text); }

    std::size_t max_, begin_ = 0, end_ = 0;
    Bytes buffer_;
    std::string message_;  // of fragments
    Op op_ = Op::binary;
    bool fragments_ = false, whole_ = false;
};

// === 9 The connection ================================================================================================

// Monotonic seconds.
inline double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Url {
    std::string host, port, path;

    // Take ws://host[:port][/path] apart; an IPv6 address stands in brackets.
    static Url parse(const std::string& text) {
        const auto refuse = [&text](const std::string& why) { throw UsageError("url must be like ws://host:port, not " + quoted(text) + ": " + why); };
        for (const char c : text)
            if (c <= ' ' || c > '~') refuse("spaces, control characters and letters beyond ASCII do not belong in it");
        if (text.compare(0, 6, "wss://") == 0) refuse("this client has no TLS; put a TLS proxy beside it and use ws://");
        if (text.compare(0, 5, "ws://") != 0) refuse("it begins with ws://");
        const std::size_t slash = std::min(text.find_first_of("/?#", 5), text.size());
        const std::string authority = text.substr(5, slash - 5);
        Url url{authority, "80", text.substr(slash)};
        if (url.path.empty() || url.path[0] != '/') url.path = "/" + url.path;
        if (url.path.find('#') != std::string::npos) refuse("it has a fragment");
        if (authority.find('@') != std::string::npos) refuse("it has credentials; use api_key");
        const std::size_t bracket = authority.rfind(']');
        const std::size_t colon = authority.find(':', bracket == std::string::npos ? 0 : bracket);
        if (colon != std::string::npos) {
            url.host = authority.substr(0, colon), url.port = authority.substr(colon + 1);
            const bool digits = !url.port.empty() && url.port.size() <= 5 && url.port.find_first_not_of("0123456789") == std::string::npos;
            if (!digits || std::stoi(url.port) < 1 || std::stoi(url.port) > 65535) refuse("a port is a number from 1 to 65535");
        }
        if (url.host.empty()) refuse("there is no host");
        return url;
    }
    // The host without the brackets of an IPv6 address.
    std::string address() const { return host[0] == '[' ? host.substr(1, host.size() - 2) : host; }
};

// Thrown where Client::stop was heard; it never leaves the client.
struct Stopped {};

// One WebSocket, driven by the thread that calls it. Waits are cut into slices, to hear Client::stop.
class Connection {
public:
    struct Settings {
        std::string url, api_key;
        double timeout_s = 10, ping_interval = 20, ping_timeout = 60;
        std::size_t max_message_bytes = std::size_t{1} << 30;
        const std::atomic<bool>* stop = nullptr;
    };

    // Connect and shake hands. Throws HandshakeError, Stopped.
    explicit Connection(const Settings& settings) : settings_(settings), url_(Url::parse(settings.url)), reader_(settings.max_message_bytes) {
        const double deadline = now_s() + settings_.timeout_s;
        dial(deadline);
        try {
            shake_hands(deadline);
        } catch (...) {
            ::close(fd_);
            throw;
        }
        heard_at_ = pinged_at_ = now_s();
    }
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;
    ~Connection() {
        if (fd_ >= 0) ::close(fd_);
    }

    // Add a message to what `flush` sends.
    void queue(const Bytes& message) { write_frame(out_, Op::binary, message.data(), message.size(), key()); }

    // Send what is queued, in one go if the socket takes it. A lost connection shows at the next `receive`.
    void flush(double deadline = std::numeric_limits<double>::infinity()) {
        double stop_heard_at = 0;
        std::size_t sent = 0;
        while (sent < out_.size() && !ended_) {
#ifdef MSG_NOSIGNAL
            const ssize_t count = ::send(fd_, out_.data() + sent, out_.size() - sent, MSG_NOSIGNAL);
#else
            const ssize_t count = ::send(fd_, out_.data() + sent, out_.size() - sent, 0);
#endif
            if (count >= 0) {
                sent += static_cast<std::size_t>(count);
            } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
                const double now = now_s();
                if (stopping() && stop_heard_at == 0) stop_heard_at = now;
                if (stop_heard_at > 0 && now - stop_heard_at > last_send_s) throw Stopped{};
                if (now > deadline) break;
                if ((wait(POLLIN | POLLOUT, slice_s) & POLLIN) != 0) read();  // a server that writes first must not wait for us
            } else if (errno != EINTR) {
                ended("sending failed: " + std::string(std::strerror(errno)));
            }
        }
        out_.clear();
    }

    // Wait for a message; pings are answered meanwhile. Throws ConnectionClosed, ProtocolError, Stopped.
    Event receive(double timeout_s = std::numeric_limits<double>::infinity()) {
        const double since = now_s();
        Event event;
        while (true) {
            while (reader_.next(event))
                if (!handle(event)) return event;
            if (ended_) throw ConnectionClosed(1006, "", how_);
            if (stopping()) throw Stopped{};
            wait_for_bytes();
            const double now = now_s();
            const double silent_s = now - std::max(since, heard_at_);
            if (settings_.ping_interval > 0 && now - pinged_at_ >= settings_.ping_interval) {
                pinged_at_ = now;
                write_frame(out_, Op::ping, "", 0, key());
                flush();
            }
            if (settings_.ping_interval > 0 && settings_.ping_timeout > 0 && silent_s > settings_.ping_interval + settings_.ping_timeout)
                ended("nothing was heard for " + std::to_string(static_cast<int>(silent_s)) + " s");
            if (now - since > timeout_s) ended("no message came within " + std::to_string(static_cast<int>(timeout_s)) + " s");
        }
    }

    // Close with a code, and wait for the server to do the same, for at most two seconds.
    void close(int code, std::string_view reason) noexcept {
        try {
            const double deadline = now_s() + 2.0;
            settings_.stop = nullptr;
            send_close(code, reason);
            flush(deadline);
            Event event;
            while (!ended_ && now_s() < deadline) {
                while (reader_.next(event))
                    if (event.op == Op::close) close_heard_ = true;
                if (close_heard_) ::shutdown(fd_, SHUT_WR);  // the server closes first; it may wait for our end as well
                wait(POLLIN, slice_s);
                read();
            }
        } catch (...) {  // broken frames, or no memory: the socket goes with this object all the same
            ended_ = true;
        }
    }

private:
    static constexpr double slice_s = 0.2;
    static constexpr double last_send_s = 0.5;  // what a message under way still gets after a stop
    static constexpr double look_s = 400e-6;    // longest look before sleeping

    bool stopping() const { return settings_.stop != nullptr && settings_.stop->load(); }
    std::uint32_t key() { return static_cast<std::uint32_t>(random_()); }

    void ended(const std::string& how) {
        if (ended_) return;
        how_ = how;
        while (!ended_ && read()) {}  // what came before the end, such as a close frame
        ended_ = true;
    }

    // Read what is there; false: nothing was.
    bool read() {
        const auto [place, size] = reader_.room();
        const ssize_t count = ::recv(fd_, place, size, 0);
        if (count > 0) {
            reader_.filled(static_cast<std::size_t>(count));
            heard_at_ = now_s();
            return true;
        }
        if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
        if (how_.empty()) how_ = count == 0 ? "the server closed the socket without a close frame" : "receiving failed: " + std::string(std::strerror(errno));
        ended_ = true;
        return false;
    }

    short wait(short what, double seconds) const {
        pollfd one{fd_, what, 0};
        const int count = ::poll(&one, 1, static_cast<int>(std::ceil(std::max(0.0, seconds) * 1000)));
        return count > 0 ? one.revents : short{0};
    }

    // Where waits are short, look for the bytes before sleeping for them: to be woken takes longer than such a wait.
    void wait_for_bytes() {
        const double began = now_s();
        const double patience = expected_s_ > look_s ? 0 : std::min(look_s, 1.5 * expected_s_ + look_s / 8);
        bool found = read();
        while (!found && !ended_ && now_s() - began < patience) {
            ::sched_yield();
            found = read();
        }
        if (!found && !ended_) {
            wait(POLLIN, slice_s);
            read();
        }
        expected_s_ += 0.25 * (std::min(now_s() - began, 4 * look_s) - expected_s_);
    }

    // Deal with control frames; false for a message.
    bool handle(const Event& event) {
        if (event.op == Op::ping) {
            write_frame(out_, Op::pong, event.payload.data(), event.payload.size(), key());
            flush();
        }
        if (event.op != Op::close) return event.op == Op::ping || event.op == Op::pong;
        const std::string payload(event.payload);
        int code = 1005;
        if (payload.size() == 1) throw ProtocolError("7", "a close frame of one byte");
        if (payload.size() >= 2) {
            code = static_cast<int>(load_bits(payload.data(), {'>', 'u', 2}));
            const bool defined = (code >= 1000 && code <= 1014 && code != 1004 && code != 1005 && code != 1006) || (code >= 3000 && code < 5000);
            if (!defined) throw ProtocolError("7", "a close frame with the code " + std::to_string(code));
        }
        const std::string reason = payload.size() > 2 ? payload.substr(2) : "";
        if (!decode_utf8(reason, nullptr)) throw ProtocolError("7", "a close reason that is no UTF-8", 1007);
        close_heard_ = true;
        send_close(code == 1005 ? 1000 : code, "");
        throw ConnectionClosed(code, reason, "the server closed with " + std::to_string(code) + " " + quoted(reason));
    }

    void send_close(int code, std::string_view reason) {
        if (close_sent_) return;
        close_sent_ = true;
        std::string cut(reason.substr(0, 120));
        while (!decode_utf8(cut, nullptr)) cut.pop_back();
        const std::string payload = std::string{static_cast<char>(code >> 8), static_cast<char>(code & 255)} + cut;
        write_frame(out_, Op::close, payload.data(), payload.size(), key());
    }

    void dial(double deadline) {
        const std::string where = "cannot connect to " + settings_.url + ": ";
        addrinfo hints{};
        hints.ai_socktype = SOCK_STREAM;
        addrinfo* list = nullptr;
        const int failed = ::getaddrinfo(url_.address().c_str(), url_.port.c_str(), &hints, &list);
        if (failed != 0) throw HandshakeError(where + ::gai_strerror(failed) + "; check the host name");
        const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, ::freeaddrinfo);
        std::string why = "it has no address";
        for (const addrinfo* one = list; one != nullptr; one = one->ai_next) {
            fd_ = ::socket(one->ai_family, one->ai_socktype, one->ai_protocol);
            if (fd_ >= 0) {
                set_options();
                int status = ::connect(fd_, one->ai_addr, one->ai_addrlen) == 0 ? 0 : errno;
                while (status == EINPROGRESS || status == EINTR) {
                    const double left = deadline - now_s();
                    if (stopping()) status = ECANCELED;
                    else if (left <= 0) status = ETIMEDOUT;
                    else if (wait(POLLOUT, std::min(slice_s, left)) != 0) {
                        socklen_t length = sizeof status;
                        ::getsockopt(fd_, SOL_SOCKET, SO_ERROR, &status, &length);
                    }
                }
                if (status == 0) return;
                ::close(fd_);
                fd_ = -1;
                errno = status;
            }
            why = std::strerror(errno);
            if (stopping()) throw Stopped{};
        }
        throw HandshakeError(where + why + "; is the training server running, and on this host and port?");
    }

    // Options that the system does not have are passed over.
    void set_options() const {
        const auto set = [this](int level, int option, int value) { ::setsockopt(fd_, level, option, &value, sizeof value); };
        ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL, 0) | O_NONBLOCK);
        ::fcntl(fd_, F_SETFD, FD_CLOEXEC);
        set(IPPROTO_TCP, TCP_NODELAY, 1);  // a small message behind another one waits 40 ms otherwise
        set(SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef SO_NOSIGPIPE
        set(SOL_SOCKET, SO_NOSIGPIPE, 1);
#endif
#if defined(TCP_KEEPIDLE) && defined(TCP_KEEPINTVL)
        set(IPPROTO_TCP, TCP_KEEPIDLE, 30);
        set(IPPROTO_TCP, TCP_KEEPINTVL, 10);
        set(IPPROTO_TCP, TCP_KEEPCNT, 3);
#endif
#ifdef TCP_USER_TIMEOUT
        set(IPPROTO_TCP, TCP_USER_TIMEOUT, 60000);
#endif
    }

    void shake_hands(double deadline) {
        std::array<std::uint8_t, 16> nonce{};
        for (auto& byte : nonce) byte = static_cast<std::uint8_t>(random_());
        const std::string sent_key = base64(nonce.data(), nonce.size());
        std::string request = "GET " + url_.path + " HTTP/1.1\r\nHost: " + url_.host + (url_.port == "80" ? "" : ":" + url_.port) +
                              "\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: " + sent_key + "\r\nSec-WebSocket-Version: 13\r\n";
        if (!settings_.api_key.empty()) request += "Authorization: Api-Key " + settings_.api_key + "\r\n";
        request += "\r\n";
        out_.assign(request.begin(), request.end());
        flush(deadline);
        std::string answer;
        std::size_t end = std::string::npos;
        while (!ended_ && end == std::string::npos) {
            if (stopping()) throw Stopped{};
            if (now_s() > deadline) throw HandshakeError(settings_.url + " did not finish the handshake in time; is it a training server, and is it free?");
            if (answer.size() > max_answer) throw HandshakeError(settings_.url + " is not a WebSocket server: it sends an endless header");
            wait(POLLIN, std::min(slice_s, deadline - now_s()));
            const auto [place, size] = reader_.room();
            const ssize_t count = ::recv(fd_, place, size, 0);
            if (count > 0) {
                answer.append(reinterpret_cast<const char*>(place), static_cast<std::size_t>(count));
                end = answer.find("\r\n\r\n");
            } else if (count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
                ended_ = true;
            }
        }
        if (end == std::string::npos)
            throw HandshakeError(settings_.url + (answer.empty() ? " closed the connection during the handshake" : " is not a WebSocket server: it sends " + quoted(answer)));
        check_answer(answer.substr(0, end + 2), answer.substr(end + 4), sent_key);
        std::size_t rest = answer.size() - end - 4;  // the metadata may have come with the answer
        for (std::size_t at = end + 4; rest > 0;) {
            const auto [place, size] = reader_.room();
            const std::size_t part = std::min(size, rest);
            std::memcpy(place, answer.data() + at, part);
            reader_.filled(part);
            at += part, rest -= part;
        }
    }

    void check_answer(const std::string& head, const std::string& body, const std::string& sent_key) const {
        if (head.size() < 13 || head.compare(0, 7, "HTTP/1.") != 0 || head.find_first_not_of("0123456789", 9) != 12)
            throw HandshakeError(settings_.url + " is not a WebSocket server: it sends " + quoted(head));
        const int status = std::stoi(head.substr(9, 3));
        if (status != 101) {
            const char* advice = status == 401   ? "the server wants an api key: pass the api_key it was started with"
                                 : status == 403 ? "the server refuses this client"
                                 : status == 404 ? "check the path of the URL"
                                                 : "is it a training server?";
            throw HandshakeError(settings_.url + " refused the handshake with HTTP " + std::to_string(status) + ": " + advice + (body.empty() ? "" : " (it says " + quoted(body) + ")"), status);
        }
        const auto fail = [this](const std::string& why) { throw HandshakeError(settings_.url + " is a broken WebSocket server: " + why); };
        bool upgrade = false, connection = false, accepted = false;
        for (std::size_t at = head.find("\r\n") + 2; at < head.size();) {
            const std::size_t stop = head.find("\r\n", at), colon = std::min(head.find(':', at), stop);
            std::string name = head.substr(at, colon - at), value = colon < stop ? head.substr(colon + 1, stop - colon - 1) : "";
            at = stop + 2;
            value.erase(0, value.find_first_not_of(" \t"));
            value.erase(value.find_last_not_of(" \t") + 1);
            lower(name);
            if (name == "sec-websocket-accept") accepted = value == accept_of(sent_key);
            if (name == "sec-websocket-extensions" || name == "sec-websocket-protocol") fail("it agrees to " + quoted(value) + ", which nobody offered");
            lower(value);
            upgrade = upgrade || (name == "upgrade" && value == "websocket");
            connection = connection || (name == "connection" && value.find("upgrade") != std::string::npos);
        }
        if (!upgrade || !connection) fail("its answer lacks the Upgrade or the Connection header");
        if (!accepted) fail("its Sec-WebSocket-Accept does not match");
    }
    static void lower(std::string& text) {
        for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
    }
    static constexpr std::size_t max_answer = 1 << 16;

    Settings settings_;
    Url url_;
    int fd_ = -1;
    FrameReader reader_;
    Bytes out_;
    std::random_device random_;
    double heard_at_ = 0, pinged_at_ = 0, expected_s_ = look_s;
    bool ended_ = false, close_heard_ = false, close_sent_ = false;
    std::string how_;
};

// === 10 Environments =================================================================================================

// A space of Gymnasium, as it travels in env-spec; make one with the functions below.
struct Space {
    enum class Type : std::uint8_t { box, discrete, multi_discrete, multi_binary, text };
    Type type = Type::box;
    Dtype dtype;
    Shape shape;                      // of one env's value; empty for discrete and text
    std::string low, high;            // box: bounds as bytes of the dtype, one element or all
    std::vector<std::int64_t> nvec;   // discrete: n, start; multi_discrete: the n of each
    std::string charset;              // text
    std::size_t max_length = 0;       // text

    std::size_t count() const {
        std::size_t product = 1;
        for (const std::int64_t extent : shape) product *= static_cast<std::size_t>(extent);
        return product;
    }
    bool is_image() const { return type == Type::box && dtype == Dtype::of<std::uint8_t>() && shape.size() == 3 && shape[2] <= 4; }
};

// Box of T (float, double, an int type): bounds of one element stand for all.
template <class T>
Space box(const Shape& shape, const std::vector<T>& low, const std::vector<T>& high) {
    static_assert(!std::is_same_v<T, bool>, "flags are a multi_binary space");
    Space space;
    space.dtype = Dtype::of<T>(), space.shape = shape;
    for (const std::int64_t extent : shape)
        if (extent < 0) throw UsageError("box: a negative extent");
    for (const auto* bound : {&low, &high})
        if (bound->size() != 1 && bound->size() != space.count()) throw UsageError("box: a bound has one element, or one per element of the shape");
    space.low.assign(reinterpret_cast<const char*>(low.data()), low.size() * sizeof(T));
    space.high.assign(reinterpret_cast<const char*>(high.data()), high.size() * sizeof(T));
    return space;
}
template <class T>
Space box(const Shape& shape, T low, T high) {
    return box<T>(shape, std::vector<T>{low}, std::vector<T>{high});
}
// Pixels [height, width, channels], uint8.
inline Space image(std::int64_t height, std::int64_t width, std::int64_t channels) {
    return box<std::uint8_t>({height, width, channels}, std::uint8_t{0}, std::uint8_t{255});
}
inline Space discrete(std::int64_t n, std::int64_t start = 0) {
    return {Space::Type::discrete, Dtype::of<std::int64_t>(), {}, "", "", {n, start}, "", 0};
}
inline Space multi_discrete(const std::vector<std::int64_t>& nvec) {
    return {Space::Type::multi_discrete, Dtype::of<std::int64_t>(), {static_cast<std::int64_t>(nvec.size())}, "", "", nvec, "", 0};
}
inline Space multi_binary(std::int64_t n) { return {Space::Type::multi_binary, Dtype::of<std::int8_t>(), {n}, "", "", {}, "", 0}; }
inline Space text(std::size_t max_length, const std::string& charset) {
    return {Space::Type::text, Dtype{Dtype::native(), 'U', 4}, {}, "", "", {}, charset, max_length};
}

// An entry of the observation. A lone entry without a name is an observation that is no dict; it travels as "obs".
struct Entry {
    std::string name;
    Space space;
    std::string wire_name() const { return name.empty() ? "obs" : name; }
};

// What an env is. All envs of a client have the same spec.
struct Spec {
    std::vector<Entry> observation;
    Space action;
    std::string env_id;                  // empty: not told
    std::int64_t max_episode_steps = 0;  // 0: not told
};

// Where one env writes its observation; entries are counted in the order of the spec.
class Observation {
public:
    Observation(const Spec& spec, std::vector<Bytes>& columns, std::vector<std::u32string>& texts, std::size_t row)
        : spec_(spec), columns_(columns), texts_(texts), row_(row) {}

    // Give the place of an entry's elements, in C order: T is the type of its space. Good for drawing images into.
    template <class T>
    T* at(std::size_t entry) {
        const Space& space = space_of(entry);
        if (space.dtype != Dtype::of<T>()) throw UsageError("observation entry " + std::to_string(entry) + " has dtype " + space.dtype.str() + ", not " + Dtype::of<T>().str());
        return reinterpret_cast<T*>(columns_[entry].data()) + row_ * space.count();
    }
    template <class T>
    void set(std::size_t entry, const T* values, std::size_t count) {
        T* place = at<T>(entry);
        if (count != space_of(entry).count()) throw UsageError("observation entry " + std::to_string(entry) + " has " + std::to_string(space_of(entry).count()) + " elements, not " + std::to_string(count));
        std::copy_n(values, count, place);
    }
    template <class T>
    void set(std::size_t entry, std::initializer_list<T> values) {
        set(entry, values.begin(), values.size());
    }
    template <class T>
    void set(std::size_t entry, const std::vector<T>& values) {
        set(entry, values.data(), values.size());
    }
    // Set a text entry, from UTF-8.
    void set_text(std::size_t entry, std::string_view utf8) {
        const Space& space = space_of(entry);
        std::u32string points;
        if (space.type != Space::Type::text || !decode_utf8(utf8, &points) || points.size() > space.max_length)
            throw UsageError("observation entry " + std::to_string(entry) + " is no text, or " + quoted(utf8) + " is no UTF-8 or too long for it");
        texts_[row_] = points;
    }

private:
    const Space& space_of(std::size_t entry) const {
        if (entry >= spec_.observation.size()) throw UsageError("there is no observation entry " + std::to_string(entry));
        return spec_.observation[entry].space;
    }
    const Spec& spec_;
    std::vector<Bytes>& columns_;
    std::vector<std::u32string>& texts_;
    std::size_t row_;
};

// One env's action of one step; it has as many elements as the action space, in whatever dtype the trainer sends.
class Action {
public:
    Action(const char* data, const Dtype& dtype, std::size_t size) : data_(data), dtype_(dtype), size_(size) {}
    std::size_t size() const { return size_; }
    const Dtype& dtype() const { return dtype_; }
    bool is_float32() const { return dtype_.kind == 'f' && dtype_.size == 4; }
    double operator[](std::size_t i) const { return load_real(place(i), dtype_); }
    // The element as an integer, rounded: what Discrete, MultiDiscrete and MultiBinary actions are.
    std::int64_t integer(std::size_t i) const {
        std::int64_t value = 0;
        if (!load_integer(place(i), dtype_, value)) throw ProtocolError("5.3", "action: an element is no 64-bit integer");
        return value;
    }

private:
    const char* place(std::size_t i) const {
        if (i >= size_) throw UsageError("the action has " + std::to_string(size_) + " elements, none at " + std::to_string(i));
        return data_ + i * dtype_.size;
    }
    const char* data_;
    Dtype dtype_;
    std::size_t size_;
};

// What a step brought, beside the observation.
struct Step {
    double reward = 0;
    bool terminated = false;  // an end of the task itself
    bool truncated = false;   // a limit of time
    bool success = false;     // read where the episode ended
};

using Seed = std::optional<std::uint64_t>;

// An environment. Whatever it throws ends the client with EnvFailed.
class Env {
public:
    Env() = default;
    Env(const Env&) = delete;
    Env& operator=(const Env&) = delete;
    virtual ~Env() = default;

    // Say what it is; asked once.
    virtual Spec spec() const = 0;
    // Begin an episode and write its first observation. Without a seed the random stream runs on.
    virtual void reset(const Seed& seed, Observation& first) = 0;
    // Take one step and write the observation after it, also on the episode's last step. Never resets by itself.
    virtual Step step(const Action& action, Observation& next) = 0;
    // Hear the options, a map, that a trainer gave to the reset that follows.
    virtual void options(const Value& options) { static_cast<void>(options); }
};

// === 11 The batch: the envs of a connection, their rows and their running episodes ====================================

using Rows = std::vector<std::size_t>;

class Batch {
public:
    explicit Batch(std::vector<std::unique_ptr<Env>> envs) : envs_(std::move(envs)) {
        if (envs_.empty() || envs_[0] == nullptr) throw UsageError("a client has one env at least");
        spec = envs_[0]->spec();
        const std::size_t n = envs_.size();
        const Bytes described = describe(spec);
        for (std::size_t row = 1; row < n; ++row)
            if (envs_[row] == nullptr || describe(envs_[row]->spec()) != described) throw UsageError("the envs of one client must have the same spec: env " + std::to_string(row) + " has another");
        for (const Entry& entry : spec.observation) columns_.emplace_back(n * entry.space.count() * entry.space.dtype.size);
        texts_.resize(n);
        for (std::size_t row = 0; row < n; ++row) all.push_back(row), indices.push_back(static_cast<std::int64_t>(row));
        for (auto* column : {&chunks, &lengths}) column->resize(n);
        for (auto* column : {&returns, &rewards}) column->resize(n);
        for (auto* column : {&terminated, &truncated, &success}) column->resize(n);
    }

    Spec spec;
    Rows all;                                         // 0 … n-1
    std::vector<std::int64_t> indices;                // the same, as they travel
    std::vector<std::int64_t> chunks, lengths;        // of the running episodes: chunks completed, env steps
    std::vector<double> returns, rewards;             // of the running episodes; of the last chunk
    std::vector<std::uint8_t> terminated, truncated, success;  // of the last step
    std::int64_t steps = 0;                           // env steps in all

    // Begin an episode; the running one is forgotten.
    void reset(std::size_t row, const Seed& seed, const Value* options = nullptr) {
        guarded("reset", row, [&] {
            if (options != nullptr && options->is(Value::Kind::map)) envs_[row]->options(*options);
            Observation first(spec, columns_, texts_, row);
            envs_[row]->reset(seed, first);
        });
        chunks[row] = lengths[row] = 0;
        returns[row] = 0;
    }

    // Run one chunk, step by step; an env's part of it ends with its episode.
    void step(const Value& action, const Rows& rows) {
        const std::size_t n = all.size(), width = spec.action.count(), item = action.dtype.size;
        const std::size_t elements = action.count();
        if (elements != action.rows() * n * width)
            throw ProtocolError("5.3", "action: " + action.describe() + " does not fit an action space of " + std::to_string(width) + " elements");
        std::int64_t whole = 0;
        for (std::size_t i = 0; spec.action.type != Space::Type::box && i < elements; ++i)
            if (!load_integer(action.text.data() + i * item, action.dtype, whole)) throw ProtocolError("5.3", "action: an element is no 64-bit integer");
        for (const std::size_t row : rows) rewards[row] = 0, terminated[row] = truncated[row] = 0;
        for (std::size_t k = 0; k < action.rows(); ++k) {
            for (const std::size_t row : rows) {
                if (terminated[row] != 0 || truncated[row] != 0) continue;
                guarded("step", row, [&] {
                    Observation next(spec, columns_, texts_, row);
                    const Step done = envs_[row]->step(Action(action.text.data() + (k * n + row) * width * item, action.dtype, width), next);
                    rewards[row] += done.reward;
                    terminated[row] = done.terminated, truncated[row] = done.truncated, success[row] = done.success;
                });
                ++lengths[row], ++steps;
            }
        }
        for (const std::size_t row : rows) ++chunks[row], returns[row] += rewards[row];
    }

    void write_observation(Writer& out, const Rows& rows) const {
        std::size_t images = 0, states = 0;
        for (const Entry& entry : spec.observation)
            if (entry.space.type != Space::Type::text) ++(entry.space.is_image() ? images : states);
        out.map(3);
        for (const bool image : {true, false}) {
            out.str(image ? "images" : "states");
            out.map(image ? images : states);
            for (std::size_t i = 0; i < spec.observation.size(); ++i) {
                const Space& space = spec.observation[i].space;
                if (space.type == Space::Type::text || space.is_image() != image) continue;
                const std::size_t size = space.count() * space.dtype.size;
                out.str(spec.observation[i].wire_name());
                out.open_array(rows.size() * size);
                if (rows.size() == all.size()) out.raw(columns_[i].data(), columns_[i].size());
                else for (const std::size_t row : rows) out.raw(columns_[i].data() + row * size, size);
                out.close_array(space.dtype, rows.size(), space.shape);
            }
        }
        std::size_t width = 1;
        for (const std::size_t row : rows) width = std::max(width, texts_[row].size());
        out.str("text");
        out.open_array(rows.size() * width * 4);
        for (const std::size_t row : rows) {
            std::u32string padded = texts_[row];
            padded.resize(width);
            out.raw(padded.data(), width * 4);
        }
        out.close_array({Dtype::native(), 'U', static_cast<std::uint32_t>(4 * width)}, rows.size(), {});
    }

    // Write the keys of env-spec that the envs themselves know; `keys` is how many others will follow.
    static void write_spec(Writer& out, const Spec& spec, std::size_t keys) {
        out.map(2 + keys + (spec.env_id.empty() ? 0 : 1) + (spec.max_episode_steps > 0 ? 1 : 0));
        out.str("observation_space");
        if (spec.observation.size() == 1 && spec.observation[0].name.empty()) {
            write_space(out, spec.observation[0].space);
        } else {
            out.map(2);
            out.str("type"), out.str("Dict"), out.str("spaces");
            out.map(spec.observation.size());
            for (const Entry& entry : spec.observation) out.str(entry.name), write_space(out, entry.space);
        }
        out.str("action_space"), write_space(out, spec.action);
        if (!spec.env_id.empty()) out.str("env_id"), out.str(spec.env_id);
        if (spec.max_episode_steps > 0) out.str("max_episode_steps"), out.integer(spec.max_episode_steps);
    }

private:
    static void write_space(Writer& out, const Space& space) {
        static const char* const types[] = {"Box", "Discrete", "MultiDiscrete", "MultiBinary", "Text"};
        const bool box = space.type == Space::Type::box;
        out.map(box ? 5 : space.type == Space::Type::discrete ? 3 : space.type == Space::Type::text ? 4 : 2);
        out.str("type"), out.str(types[static_cast<std::size_t>(space.type)]);
        if (box) {
            for (const bool low : {true, false}) {
                const std::string& bound = low ? space.low : space.high;
                out.str(low ? "low" : "high");
                out.open_array(bound.size());
                out.raw(bound.data(), bound.size());
                const bool one = bound.size() == space.dtype.size;
                if (one) out.close_array(space.dtype, 1, {});
                else out.close_array(space.dtype, static_cast<std::size_t>(space.shape[0]), Shape(space.shape.begin() + 1, space.shape.end()));
            }
            out.str("dtype"), out.str(space.dtype.str());
        }
        if (box || space.type == Space::Type::multi_binary) {
            out.str("shape"), out.list(space.shape.size());
            for (const std::int64_t extent : space.shape) out.integer(extent);
        }
        if (space.type == Space::Type::discrete) out.str("n"), out.integer(space.nvec[0]), out.str("start"), out.integer(space.nvec[1]);
        if (space.type == Space::Type::multi_discrete) out.str("nvec"), out.column(space.nvec);
        if (space.type == Space::Type::text) {
            out.str("min_length"), out.integer(0), out.str("max_length"), out.natural(space.max_length);
            out.str("charset"), out.str(space.charset);
        }
    }

    static Bytes describe(const Spec& spec) {
        std::set<std::string> names;
        int texts = 0;
        for (const Entry& entry : spec.observation) {
            if (!names.insert(entry.wire_name()).second || (entry.name.empty() && spec.observation.size() > 1))
                throw UsageError("the entries of an observation have different names, none of them empty");
            if (entry.space.type == Space::Type::text && ++texts > 1) throw UsageError("an observation has one text at most");
        }
        if (spec.observation.empty()) throw UsageError("an observation has one entry at least");
        if (spec.action.type == Space::Type::text) throw UsageError("text is no action");
        Bytes out;
        Writer writer(out);
        write_spec(writer, spec, 0);
        return out;
    }

    template <class Call>
    static void guarded(const char* what, std::size_t row, Call&& call) {
        const std::string failed = "env " + std::to_string(row) + " failed in " + what + "(): ";
        try {
            call();
        } catch (const std::exception& error) {
            std::throw_with_nested(EnvFailed(failed + error.what()));
        } catch (...) {
            std::throw_with_nested(EnvFailed(failed + "it threw what is no std::exception"));
        }
    }

    std::vector<std::unique_ptr<Env>> envs_;
    std::vector<Bytes> columns_;  // one [n, *shape] per entry
    std::vector<std::u32string> texts_;
};

// === 12 The session: who may say what when [4] =======================================================================

// One connection's state: bytes of the server in, messages for it out. No socket in here.
class Session {
public:
    enum class State : std::uint8_t { metadata, infer, action, feedback };  // what is due

    explicit Session(std::size_t num_envs) : legal_(num_envs, 0) {}

    State state() const { return state_; }
    const Value& metadata() const { return metadata_; }  // its data
    const Value& action() const { return *action_; }     // [H, n, *da]
    // Whom to reset instead of stepping, per env; null where nobody is to be reset.
    bool is_reset(std::size_t row) const { return !resets_.empty() && resets_[row].asked; }
    const Seed& seed(std::size_t row) const { return resets_[row].seed; }
    const Value* options(std::size_t row) const { return resets_[row].options; }

    bool offers(std::string_view feature) const {
        const Value* features = metadata_.find("features");
        if (features == nullptr || !features->is(Kind::list)) return false;
        return std::any_of(features->items.begin(), features->items.end(), [&](const Value& one) { return one.is(Kind::text) && one.text == feature; });
    }

    // Take in one message of the server: metadata first, then an action for each infer.
    void receive(std::string_view bytes) {
        Value message = decode(bytes);
        if (!message.is(Kind::map)) throw ProtocolError("2", "a message is a map, got " + message.describe());
        const Value* type = message.find("message_type");
        const std::string name = type != nullptr && type->is(Kind::text) ? type->text : "";
        const char* due = state_ == State::metadata ? "metadata" : state_ == State::action ? "action" : "nothing";
        if (name != "metadata" && name != "action" && name != "infer" && name != "feedback") throw ProtocolError("2", "message_type must be one of metadata, action, infer, feedback, got " + quoted(name));
        if (name != due) throw ProtocolError("4.2", name + " came, " + due + " was due");
        if (state_ == State::metadata) {
            const Value* data = message.find("data");
            if (data != nullptr && !data->is(Kind::map)) throw ProtocolError("5.1", "metadata: data must be a map, got " + data->describe());
            if (data != nullptr) metadata_ = *data;
            state_ = State::infer;
        } else {
            message_ = std::move(message);
            read_action();
            state_ = State::feedback;
        }
    }

    // Write an infer for all envs, leaving out what the server has if `reuse` [10.1].
    template <class WriteSpec>
    void infer(Bytes& out, const Batch& batch, bool reuse, WriteSpec* write_env_spec) {
        Rows rows;
        for (const std::size_t row : batch.all)
            if (legal_[row] == 0) rows.push_back(row);
        reuse = reuse && rows.size() < batch.all.size() && offers("reuse-feedback-obs");
        if (state_ != State::infer) throw UsageError("an infer is not due");
        Writer writer(out);
        writer.map(4U + (reuse ? 1 : 0) + (write_env_spec != nullptr ? 1 : 0));
        writer.str("message_type"), writer.str("infer");
        writer.str("data"), batch.write_observation(writer, reuse ? rows : batch.all);
        writer.str("env_indices"), writer.column(batch.indices);
        writer.str("step_ids"), writer.column(batch.chunks);
        if (reuse) writer.str("reuse"), writer.flags(legal_);
        if (write_env_spec != nullptr) writer.str("env_spec"), (*write_env_spec)(writer);
        state_ = State::action;
    }

    // Write the feedback of the rows that were stepped [5.4].
    void feedback(Bytes& out, const Batch& batch, const Rows& rows) {
        if (state_ != State::feedback) throw UsageError("a feedback is not due");
        const auto pick = [&rows](const auto& column) {
            std::decay_t<decltype(column)> picked;
            for (const std::size_t row : rows) picked.push_back(column[row]);
            return picked;
        };
        std::vector<std::uint8_t> ended, success;
        for (const std::size_t row : rows) ended.push_back(batch.terminated[row] | batch.truncated[row]), success.push_back(ended.back() & batch.success[row]);
        Writer writer(out);
        writer.map(4);
        writer.str("message_type"), writer.str("feedback");
        writer.str("env_indices"), writer.column(pick(batch.indices));
        writer.str("step_ids"), writer.column(pick(batch.chunks));
        writer.str("data"), writer.map(5);
        writer.str("obs"), batch.write_observation(writer, rows);
        writer.str("rewards");
        const std::vector<double> rewards = pick(batch.rewards);
        if (offers("env-spec")) writer.column(rewards);
        else writer.column(std::vector<float>(rewards.begin(), rewards.end()));
        writer.str("terminated"), writer.flags(pick(batch.terminated));
        writer.str("truncated"), writer.flags(pick(batch.truncated));
        writer.str("info");
        if (std::count(ended.begin(), ended.end(), 0) == static_cast<std::ptrdiff_t>(rows.size())) {
            writer.map(0);
        } else {
            writer.map(1);
            writer.str("episode"), writer.map(4);
            writer.str("r"), writer.column(pick(batch.returns));
            writer.str("l"), writer.column(pick(batch.lengths));
            writer.str("s"), writer.flags(success);
            writer.str("mask"), writer.flags(ended);
        }
        for (std::size_t i = 0; i < rows.size(); ++i) legal_[rows[i]] = ended[i] == 0;
        state_ = State::infer;
    }

private:
    using Kind = Value::Kind;
    struct Reset {
        bool asked = false;
        Seed seed;
        const Value* options = nullptr;
    };

    static const Value& need(const Value& map, const char* key, const char* what) {
        const Value* found = map.find(key);
        if (found == nullptr) throw ProtocolError("5.3", std::string(what) + ": the key " + key + " is missing, or it is no map");
        return *found;
    }

    // Read names of envs of this connection: different ones, n of them at most.
    Rows names(const Value& value, const char* clause) const {
        if (!value.is(Kind::array) || value.shape.size() != 1 || !value.dtype.is_int()) throw ProtocolError(clause, "action: env_ids must be a 1-d int array, got " + value.describe());
        Rows found;
        std::vector<std::uint8_t> seen(legal_.size(), 0);
        for (std::size_t i = 0; i < value.count(); ++i) {
            const std::uint64_t bits = load_bits(value.text.data() + i * value.dtype.size, value.dtype);
            if (bits >= seen.size() || seen[bits] != 0) throw ProtocolError(clause, "action: env_ids names an env that the infer does not, or one twice");
            seen[bits] = 1;
            found.push_back(static_cast<std::size_t>(bits));
        }
        return found;
    }

    void read_action() {
        const std::size_t n = legal_.size();
        const Value& data = need(message_, "data", "action");
        const Value& action = need(data, "action", "action: data");
        if (!action.is(Kind::array) || action.shape.size() < 2 || !action.dtype.is_number() || action.rows() < 1 || action.shape[1] != static_cast<std::int64_t>(n))
            throw ProtocolError("5.3", "action: action must be a numeric array [H, " + std::to_string(n) + ", *da] with H of at least 1, got " + action.describe());
        if (const Value* ids = data.find("env_ids")) {
            const Rows order = names(*ids, "5.3");
            if (order.size() != n || !std::is_sorted(order.begin(), order.end())) throw ProtocolError("5.3", "action: env_ids are not the infer's env_indices in their order");
        }
        const Value* horizon = metadata_.find("action_horizon");
        if (horizon != nullptr && horizon->is(Kind::integer) && action.shape[0] > horizon->number)
            throw ProtocolError("5.1", "action: " + std::to_string(action.shape[0]) + " steps, the metadata announced a horizon of " + std::to_string(horizon->number));
        action_ = &action;
        resets_.clear();
        const Value* reset = message_.find("reset");
        if (reset != nullptr && !reset->is(Kind::nil)) read_resets(*reset);
    }

    void read_resets(const Value& reset) {
        const char* clause = "seeded-reset";
        if (!offers(clause)) throw ProtocolError(clause, "action: reset, but the metadata does not list seeded-reset");
        const Rows rows = names(need(reset, "env_ids", "action: reset"), clause);
        const Value* seeds = reset.find("seed");
        const Value* options = reset.find("options");
        if (options != nullptr && (!options->is(Kind::list) || options->items.size() != rows.size())) throw ProtocolError(clause, "action: reset.options must be a list of a map or nil per env");
        resets_.assign(legal_.size(), {});
        for (std::size_t i = 0; i < rows.size(); ++i) {
            Reset& one = resets_[rows[i]];
            one.asked = true;
            legal_[rows[i]] = 0;
            if (options != nullptr) one.options = &options->items[i];
            if (one.options != nullptr && !one.options->is(Kind::map) && !one.options->is(Kind::nil)) throw ProtocolError(clause, "action: reset.options must hold maps or nils, got " + one.options->describe());
            if (seeds == nullptr) continue;
            std::int64_t seed = -1;
            if (seeds->is(Kind::list) && seeds->items.size() == rows.size()) {
                const Value& value = seeds->items[i];
                if (value.is(Kind::nil)) continue;
                if (!value.is_natural()) throw ProtocolError(clause, "action: reset.seed must hold non-negative ints or nils, got " + value.describe());
                one.seed = static_cast<std::uint64_t>(value.number);
            } else if (seeds->is(Kind::array) && seeds->shape.size() == 1 && seeds->count() == rows.size() && seeds->dtype.is_int() &&
                       load_integer(seeds->text.data() + i * seeds->dtype.size, seeds->dtype, seed) && seed >= 0) {
                one.seed = static_cast<std::uint64_t>(seed);
            } else {
                throw ProtocolError(clause, "action: reset.seed must be a list or an int array of one seed per env, got " + seeds->describe());
            }
        }
    }

    State state_ = State::metadata;
    Value metadata_, message_;
    const Value* action_ = nullptr;
    std::vector<Reset> resets_;
    std::vector<std::uint8_t> legal_;  // per env: whether its last feedback may stand for its next observation [10.1]
};

// === 13 The client ===================================================================================================

// The names and defaults are those of the Python client's options; 0 seconds stand for "no limit", or no pings.
struct Options {
    std::string url = "ws://127.0.0.1:8000";
    std::string api_key;                        // empty: none is sent [1.2]
    Seed seed;                                  // env j's first reset gets seed + first_env + j
    std::optional<std::int64_t> rank;           // place among the clients of a run
    std::optional<std::uint64_t> first_env;     // index of env 0 in the whole run; not set: rank * envs
    std::optional<std::int64_t> group_num_envs; // envs of all clients that were started together; not set: our own
    bool reuse = true;                          // leave out observations that the server has [10.1]
    double connect_timeout = 300;               // seconds without a server after which to give up
    double ping_interval = 20, ping_timeout = 60;
    double max_backoff = 5;                     // longest wait between two tries
    std::size_t max_message_bytes = std::size_t{1} << 30;
    std::string client = "plugrl-cpp";
    std::string version = client_version;
    std::function<void(bool warning, const std::string& text)> log;  // called in run's thread
};

struct Episode {
    double ret = 0;
    std::int64_t length = 0;
};

struct Summary {
    std::int64_t episodes = 0, steps = 0, reconnects = 0;
    double total_return = 0;    // of all finished episodes
    std::deque<Episode> recent; // the last finished ones, 1000 at most, oldest first
    bool stopped = false;       // by Client::stop; otherwise the server said that the run is over [7.1]
};

class Client {
public:
    Client(Options options, std::vector<std::unique_ptr<Env>> envs) : options_(std::move(options)), batch_(std::move(envs)), random_(std::random_device{}()) {
        Url::parse(options_.url);
        for (const double seconds : {options_.connect_timeout, options_.ping_interval, options_.ping_timeout, options_.max_backoff})
            if (!(seconds >= 0 && seconds < 1e9)) throw UsageError("timeouts and intervals are seconds, 0 or more");
        const auto printable = [](char c) { return c > ' ' && c <= '~'; };
        if (!std::all_of(options_.api_key.begin(), options_.api_key.end(), printable)) throw UsageError("api_key must be printable ASCII without spaces");
    }

    // End `run` soon, with close code 1000 [7.5]: from any thread, or from a signal handler. A step is waited for.
    void stop() noexcept { stop_.store(true); }

    // What was done so far.
    const Summary& summary() const { return summary_; }

    // Serve until the server says that the run is over, or `stop` is called. A lost connection is made again, with
    // backoff; the episodes go on, and feedback that could not be delivered is dropped [7.6].
    // Throws EnvFailed, ConnectTimeout; HandshakeError for 401 and 403; ProtocolError for a text frame [7.4].
    Summary run() {
        const std::uint64_t first = options_.first_env.value_or(static_cast<std::uint64_t>(options_.rank.value_or(0)) * batch_.all.size());
        for (const std::size_t row : batch_.all) batch_.reset(row, options_.seed ? Seed(*options_.seed + first + row) : Seed());
        try {
            std::string error;
            while (attempt(error)) pause(error);
        } catch (const Stopped&) {
            summary_.stopped = true;
        }
        return summary_;
    }

private:
    static constexpr double dial_timeout_s = 10, metadata_timeout_s = 30;

    void log(bool warning, const std::string& text) const {
        if (options_.log) options_.log(warning, text);
    }
    double remaining_s() const { return options_.connect_timeout == 0 ? std::numeric_limits<double>::infinity() : std::max(0.0, options_.connect_timeout - without_server_s_); }

    // Connect once and serve for as long as it lasts; true: come back, because of `error`.
    bool attempt(std::string& error) {
        if (stop_.load()) throw Stopped{};
        const double began = now_s();
        connected_at_ = 0;
        bool again = true;
        try {
            Connection::Settings settings{options_.url, options_.api_key, std::max(1.0, std::min(dial_timeout_s, remaining_s())), options_.ping_interval, options_.ping_timeout, options_.max_message_bytes, &stop_};
            Connection connection(settings);
            again = converse(connection, error);
        } catch (const HandshakeError& refused) {
            if (refused.status == 401 || refused.status == 403) throw;
            error = refused.what();
        }
        const double now = now_s();
        if (connected_at_ == 0) without_server_s_ += now - began;
        else if (++summary_.reconnects, now - connected_at_ >= std::max(5.0, options_.max_backoff)) tries_ = 0, without_server_s_ = 0;
        if (!again && connected_at_ != 0) --summary_.reconnects;
        return again;
    }

    // Run the exchange and close the connection as its end demands; true: come back.
    bool converse(Connection& connection, std::string& error) {
        bool again = true;
        try {
            exchange(connection);
        } catch (const ConnectionClosed& closed) {
            connection.close(1000, "");
            if (stop_.load()) throw Stopped{};
            error = options_.url + ": " + closed.what();
            if (closed.code != 1001 || closed.reason != "plugrl-server-stop") return again;
            log(batch_.steps == 0, options_.url + " says that the run is over" + (batch_.steps == 0 ? ", before a step was taken: the log of the server tells why" : ""));
            again = false;
        } catch (const ProtocolError& broken) {
            connection.close(broken.close_code, broken.what());
            error = options_.url + " broke the protocol: " + broken.what();
            if (broken.clause == "7.4") throw ProtocolError("7.4", options_.url + " sent a text frame; is it a training server?", broken.close_code);
        } catch (const Stopped&) {
            connection.close(1000, "");
            throw;
        } catch (...) {
            connection.close(1011, "env failed");
            throw;
        }
        return again;
    }

    // Metadata, then infer, action, feedback for as long as the connection lasts; it returns only by throwing.
    void exchange(Connection& connection) {
        Session session(batch_.all.size());
        Bytes out;
        receive(connection, session, std::min(metadata_timeout_s, remaining_s()));
        connected_at_ = now_s();
        const Value* server = session.metadata().find("server");
        log(false, "connected to " + options_.url + ", server " + (server != nullptr && server->is(Value::Kind::text) ? quoted(server->text) : "unknown"));
        const auto write_spec = [this](Writer& writer) { env_spec(writer); };
        session.infer(out, batch_, options_.reuse, session.offers("env-spec") ? &write_spec : nullptr);
        connection.queue(out);
        connection.flush();
        while (true) {
            receive(connection, session, std::numeric_limits<double>::infinity());
            Rows rows;
            for (const std::size_t row : batch_.all)
                if (!session.is_reset(row)) rows.push_back(row);
            batch_.step(session.action(), rows);
            summary_.steps = batch_.steps;
            out.clear();
            session.feedback(out, batch_, rows);
            connection.queue(out);
            for (const std::size_t row : rows)
                if (batch_.terminated[row] != 0 || batch_.truncated[row] != 0) finish(row);
            for (const std::size_t row : batch_.all)
                if (session.is_reset(row)) batch_.reset(row, session.seed(row), session.options(row));
            out.clear();
            session.infer(out, batch_, options_.reuse, static_cast<decltype(write_spec)*>(nullptr));
            connection.queue(out);
            if (stop_.load()) throw Stopped{};
            connection.flush();  // both messages in one send
        }
    }

    static void receive(Connection& connection, Session& session, double timeout_s) {
        const Event event = connection.receive(timeout_s);
        if (event.op == Op::text) throw ProtocolError("7.4", "a text frame", 1003);
        session.receive(event.payload);
    }

    // Remember an episode that ended, and begin the next.
    void finish(std::size_t row) {
        summary_.recent.push_back({batch_.returns[row], batch_.lengths[row]});
        if (summary_.recent.size() > 1000) summary_.recent.pop_front();
        ++summary_.episodes;
        summary_.total_return += batch_.returns[row];
        batch_.reset(row, Seed());
    }

    void env_spec(Writer& out) const {
        const auto n = static_cast<std::int64_t>(batch_.all.size());
        Batch::write_spec(out, batch_.spec, 5U + (options_.rank ? 1 : 0));
        out.str("num_envs"), out.integer(n);
        out.str("group_num_envs"), out.integer(options_.group_num_envs.value_or(n));
        out.str("features"), out.list(3);
        out.str("reuse-feedback-obs"), out.str("env-spec"), out.str("seeded-reset");
        out.str("client"), out.str(options_.client), out.str("client_version"), out.str(options_.version);
        if (options_.rank) out.str("rank"), out.integer(*options_.rank);
    }

    // Wait for the next try, longer from try to try and jittered, or give up.
    void pause(const std::string& error) {
        ++tries_;
        if (remaining_s() <= 0)
            throw ConnectTimeout("no training server served this client at " + options_.url + " for " + std::to_string(static_cast<int>(without_server_s_)) + " s (" + std::to_string(tries_) + " tries); the last one: " + error);
        const double longest = std::min(options_.max_backoff, 0.2 * std::ldexp(1.0, std::min(tries_ - 1, 60)));
        const double wait_s = std::min(longest * std::uniform_real_distribution<double>(0.5, 1.0)(random_), remaining_s());
        if (connected_at_ != 0 || (tries_ & (tries_ - 1)) == 0)  // waiting for a trainer that starts is said less and less
            log(true, error + "; trying again (" + std::to_string(tries_) + " so far)");
        for (const double until = now_s() + wait_s; now_s() < until;) {
            if (stop_.load()) throw Stopped{};
            std::this_thread::sleep_for(std::chrono::duration<double>(std::min(0.1, std::max(0.0, until - now_s()))));
        }
        without_server_s_ += wait_s;
    }

    Options options_;
    Batch batch_;
    Summary summary_;
    std::minstd_rand random_;
    std::atomic<bool> stop_{false};
    int tries_ = 0;
    double without_server_s_ = 0, connected_at_ = 0;
};

// Serve these envs until the run is over.
inline Summary run(const Options& options, std::vector<std::unique_ptr<Env>> envs) { return Client(options, std::move(envs)).run(); }

}  // namespace plugrl

#endif

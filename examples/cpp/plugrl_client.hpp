// An env client for PlugRL wire protocol version 1 in one header: C++17, the standard library, POSIX sockets.
//
// Derive from plugrl::Env (spec, reset, step), then call plugrl::run. docs/cpp-client.md is the manual,
// docs/protocol.md the protocol; numbers in brackets are its clauses. Linux and macOS, no TLS (wss://). One thread does
// it all: pings wait while an env steps, which is allowed [1]. Nothing is printed: errors are exceptions, news goes to
// Options::log.
//
//    1 Errors          6 Writing msgpack    11 Environments: what authors write
//    2 Text            7 Reading msgpack    12 The digest of a step
//    3 SHA-1, base64   8 Frames             13 The batch of envs
//    4 Dtypes          9 Options            14 The session: who may say what
//    5 Values         10 The connection     15 The client
#ifndef PLUGRL_CLIENT_HPP
#define PLUGRL_CLIENT_HPP

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // SO_NOSIGPIPE does it
#endif

namespace plugrl {

using std::int64_t, std::size_t, std::string, std::string_view, std::uint32_t, std::uint64_t, std::uint8_t;
using Shape = std::vector<int64_t>;
using Rows = std::vector<size_t>;

constexpr const char* client_version = "0.1.0";
constexpr double forever = std::numeric_limits<double>::infinity();

// === 1 Errors ========================================================================================================

// Each says what was expected and what came. `code` is an HTTP status or a close code, `detail` a clause or a close
// reason; which of the two, the comments below say.
struct Error : public std::runtime_error {
    explicit Error(const string& text, int number = 0, const string& more = "")
        : runtime_error(text), code(number), detail(more) {}
    int code;
    string detail;
};
// An option, a spec or an observation of ours is unusable.
struct UsageError : public Error {
    using Error::Error;
};
// An env threw; its exception is nested in this one.
struct EnvFailed : public Error {
    using Error::Error;
};
// There was no server for Options::connect_timeout seconds.
struct ConnectTimeout : public Error {
    using Error::Error;
};
// The connection did not open. Code: the HTTP status, or 0.
struct HandshakeError : public Error {
    using Error::Error;
};
// The connection ended. Code and reason: those of the close frame, 1006 without one.
struct ConnectionClosed : public Error {
    using Error::Error;
};
// The server broke a clause. Code: the close code it is told. Clause 7.4 is a text frame.
struct ProtocolError : public Error {
    using Error::Error;
};

// === 2 Text ==========================================================================================================

// A part of an error text: a string, or an integer.
struct Piece {
    Piece(const char* piece) : text(piece) {}
    Piece(const string& piece) : text(piece.c_str()) {}
    template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
    Piece(T value) : number(static_cast<long long>(value)) {}
    const char* text = nullptr;
    long long number = 0;
};
using Pieces = std::initializer_list<Piece>;

inline string cat(Pieces pieces) {
    string out;
    for (const Piece& piece : pieces) {
        if (piece.text != nullptr) {
            out += piece.text;
        } else {
            char digits[24];
            std::snprintf(digits, sizeof digits, "%lld", piece.number);
            out += digits;
        }
    }
    return out;
}
[[noreturn]] inline void refuse(const char* clause, Pieces pieces, int close_code = 1002) {
    throw ProtocolError(cat({"[", clause, "] ", cat(pieces)}), close_code, clause);
}
[[noreturn]] inline void misuse(Pieces pieces) {
    throw UsageError(cat(pieces));
}

inline bool is_printable(char c) {
    return c >= ' ' && c <= '~';
}
// What a peer sent, for an error text: short, and printable.
inline string quote(string_view text) {
    string out = "'";
    for (const char c : text.substr(0, 200)) out += is_printable(c) ? c : '?';
    return out + "'";
}
inline bool is_unicode(uint64_t point) {
    return point < 0xD800 || (point >= 0xE000 && point <= 0x10FFFF);
}
// Bytes of the UTF-8 character that begins with `head`; 0 if none does.
inline size_t utf8_length(uint8_t head) {
    if (head < 0x80) return 1;
    if (head < 0xC2) return 0;  // a continuation, or a long form of ASCII
    if (head < 0xE0) return 2;
    if (head < 0xF0) return 3;
    return head < 0xF5 ? 4 : 0;
}
// Read UTF-8; false if it is none. `utf32`, unless it is null, gets code points of four bytes, in this machine's order.
inline bool read_utf8(string_view in, string* utf32) {
    for (size_t at = 0, length = 0; at < in.size(); at += length) {
        const auto head = static_cast<uint8_t>(in[at]);
        length = utf8_length(head);
        if (length == 0 || length > in.size() - at) return false;
        uint32_t point = length == 1 ? head : head & (0x7FU >> length);
        for (size_t i = 1; i < length; ++i) {
            const auto byte = static_cast<uint8_t>(in[at + i]);
            if ((byte & 0xC0) != 0x80) return false;
            point = point << 6 | (byte & 0x3FU);
        }
        const bool too_long = (length == 3 && point < 0x800) || (length == 4 && point < 0x10000);
        if (too_long || !is_unicode(point)) return false;
        if (utf32 != nullptr) utf32->append(reinterpret_cast<const char*>(&point), 4);
    }
    return true;
}

// === 3 SHA-1 and base64, for the handshake of RFC 6455 ===============================================================

inline string sha1(string_view text) {
    const auto rotate = [](uint32_t x, unsigned by) { return x << by | x >> (32 - by); };
    string padded(text);
    padded += '\x80';
    padded.resize((padded.size() + 71) / 64 * 64 - 8);
    const uint64_t bits = uint64_t{text.size()} * 8;
    for (unsigned i = 8; i > 0; --i) padded += static_cast<char>(bits >> (8 * (i - 1)) & 0xFF);

    uint32_t state[5] = {0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0};
    for (size_t block = 0; block < padded.size(); block += 64) {
        uint32_t w[80] = {};
        for (size_t i = 0; i < 64; ++i) w[i / 4] = w[i / 4] << 8 | static_cast<uint8_t>(padded[block + i]);
        for (size_t i = 16; i < 80; ++i) w[i] = rotate(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 1);
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
        for (size_t i = 0; i < 80; ++i) {
            uint32_t mixed = 0, constant = 0;
            if (i < 20) {
                mixed = (b & c) | (~b & d);
                constant = 0x5A827999;
            } else if (i < 40) {
                mixed = b ^ c ^ d;
                constant = 0x6ED9EBA1;
            } else if (i < 60) {
                mixed = (b & c) | (b & d) | (c & d);
                constant = 0x8F1BBCDC;
            } else {
                mixed = b ^ c ^ d;
                constant = 0xCA62C1D6;
            }
            const uint32_t next = rotate(a, 5) + mixed + e + constant + w[i];
            e = d;
            d = c;
            c = rotate(b, 30);
            b = a;
            a = next;
        }
        state[0] += a;
        state[1] += b;
        state[2] += c;
        state[3] += d;
        state[4] += e;
    }
    string digest;
    for (size_t i = 0; i < 20; ++i) digest += static_cast<char>(state[i / 4] >> (24 - 8 * (i % 4)) & 0xFF);
    return digest;
}
inline string base64(string_view data) {
    const char* letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    string out;
    for (size_t at = 0; at < data.size(); at += 3) {
        const size_t left = std::min<size_t>(3, data.size() - at);
        uint32_t bits = 0;
        for (size_t i = 0; i < 3; ++i) bits = bits << 8 | (i < left ? static_cast<uint8_t>(data[at + i]) : 0U);
        for (size_t i = 0; i < 4; ++i) out += i <= left ? letters[bits >> (18 - 6 * i) & 63] : '=';
    }
    return out;
}
// The Sec-WebSocket-Accept that belongs to a Sec-WebSocket-Key.
inline string accept_of(const string& key) {
    return base64(sha1(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"));
}

// === 4 Dtypes [3] ====================================================================================================

// A numpy typestr: byte order `<`, `>` or `|`; kind b, i, u, f or U; bytes per item.
struct Dtype {
    char order = '|';
    char kind = 'u';
    uint32_t size = 1;

    template <class T>
    static Dtype of() {
        static_assert(std::is_arithmetic_v<T> && sizeof(T) <= 8, "the wire carries bool, ints, float and double");
        constexpr char number = std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
        return {sizeof(T) == 1 ? '|' : native(), std::is_same_v<T, bool> ? 'b' : number, sizeof(T)};
    }
    // A str of this machine, of `points` code points.
    static Dtype text(uint32_t points) { return {native(), 'U', 4 * points}; }
    static Dtype parse(const string& typestr) {
        Dtype dtype;
        if (!read(typestr, dtype)) {
            refuse("3", {"dtype ", quote(typestr), " is refused: expected such as <f4, |b1 or <U8"});
        }
        return dtype;
    }
    // The byte order of this machine.
    static char native() {
        const uint32_t probe = '<' | '>' << 24;
        return *reinterpret_cast<const char*>(&probe);
    }
    string str() const {
        const char name[] = {order, kind, '\0'};
        return cat({name, kind == 'U' ? size / 4 : size});
    }
    bool is_int() const { return kind == 'i' || kind == 'u'; }
    bool operator==(const Dtype& other) const {
        return order == other.order && kind == other.kind && size == other.size;
    }

private:
    static bool read(const string& typestr, Dtype& out) {
        if (typestr.size() < 3 || typestr.size() > 8) return false;
        if (typestr[2] == '0' || typestr.find_first_not_of("0123456789", 2) != string::npos) return false;
        const char order = typestr[0], kind = typestr[1];
        const auto size = static_cast<uint32_t>(std::strtol(&typestr[2], nullptr, 10));
        if (order != '<' && order != '>' && (order != '|' || size != 1)) return false;
        const bool whole = size == 1 || size == 2 || size == 4 || size == 8;
        switch (kind) {
            case 'b':
                out = {order, kind, size};
                return size == 1;
            case 'i':
            case 'u':
                out = {order, kind, size};
                return whole;
            case 'f':
                out = {order, kind, size};
                return whole && size != 1;
            case 'U':
                out = {order, kind, 4 * size};
                return order != '|';
            default:
                return false;
        }
    }
};

// Read the bits of one item of at most eight bytes.
inline uint64_t load_bits(const char* at, const Dtype& dtype) {
    uint64_t bits = 0;
    for (uint32_t i = 0; i < dtype.size; ++i) {
        const uint32_t next = dtype.order == '>' ? i : dtype.size - 1 - i;  // the most significant byte comes first
        bits = bits << 8 | static_cast<uint8_t>(at[next]);
    }
    return bits;
}
inline int64_t sign_extended(uint64_t bits, size_t bytes) {
    const size_t unused = 64 - 8 * bytes;
    return static_cast<int64_t>(bits << unused) >> unused;
}
// The value of a float of 16 bits, which C++17 lacks.
inline double half_of(uint64_t bits) {
    const int exponent = static_cast<int>(bits >> 10 & 31);
    const int fraction = static_cast<int>(bits & 1023);
    double size = 0;
    if (exponent == 0) {
        size = std::ldexp(fraction, -24);
    } else if (exponent < 31) {
        size = std::ldexp(fraction + 1024, exponent - 25);
    } else {
        size = fraction > 0 ? std::numeric_limits<double>::quiet_NaN() : forever;
    }
    return (bits & 0x8000) != 0 ? -size : size;
}
// Read one number as a double: exact for every float, and for ints up to 2^53.
inline double load_real(const char* at, const Dtype& dtype) {
    const uint64_t bits = load_bits(at, dtype);
    if (dtype.kind == 'i') return static_cast<double>(sign_extended(bits, dtype.size));
    if (dtype.kind != 'f') return static_cast<double>(bits);
    if (dtype.size == 2) return half_of(bits);
    if (dtype.size == 4) {
        const auto narrow = static_cast<uint32_t>(bits);
        float single = 0;
        std::memcpy(&single, &narrow, 4);
        return static_cast<double>(single);
    }
    double wide = 0;
    std::memcpy(&wide, &bits, 8);
    return wide;
}
// Read one number as an integer, floats rounded half to even; false if it is none of 64 bits.
inline bool load_integer(const char* at, const Dtype& dtype, int64_t& out) {
    if (dtype.kind == 'f') {
        const double value = std::nearbyint(load_real(at, dtype));
        const bool fits = value >= -9223372036854775808.0 && value < 9223372036854775808.0;
        if (fits) out = static_cast<int64_t>(value);
        return fits;
    }
    const uint64_t bits = load_bits(at, dtype);
    out = dtype.kind == 'i' ? sign_extended(bits, dtype.size) : static_cast<int64_t>(bits);
    return dtype.kind == 'i' || out >= 0;
}

// === 5 Values ========================================================================================================

enum class Kind : uint8_t { nil, boolean, integer, natural, real, text, bytes, list, map, array, scalar };

// What msgpack carries, and arrays. Which members mean something depends on the kind.
struct Value {
    Kind kind = Kind::nil;
    Dtype dtype;               // array, scalar
    int64_t number = 0;        // boolean, integer; natural (above 2^63 - 1): its bits
    double real = 0;           // real
    string text;               // text (UTF-8), bytes; array: its data in C order
    std::vector<Value> items;  // list; map: key, value, key, value …; scalar: its one number or text
    Shape shape;               // array

    static Value of(Kind kind, int64_t number = 0) {
        Value value;
        value.kind = kind;
        value.number = number;
        return value;
    }
    bool is(Kind wanted) const { return kind == wanted; }
    bool is_number() const { return is(Kind::integer) || is(Kind::natural) || is(Kind::real); }
    size_t count() const { return text.size() / dtype.size; }                // elements of an array
    const char* at(size_t i) const { return text.data() + i * dtype.size; }  // one of them
    // Find the value of a map's key; null if there is none, or if this is no map.
    const Value* find(string_view key, Kind key_kind = Kind::text) const {
        if (kind != Kind::map) return nullptr;
        for (size_t i = 0; i + 1 < items.size(); i += 2) {
            if (items[i].kind == key_kind && items[i].text == key) return &items[i + 1];
        }
        return nullptr;
    }
    string describe() const {
        static const char* const names[] = {"nil",   "a bool", "an int", "an int",    "a float",        "a str",
                                            "a bin", "a list", "a map",  "an array ", "a numpy scalar "};
        string out = names[static_cast<size_t>(kind)];
        if (kind >= Kind::array) out += dtype.str();
        for (size_t i = 0; i < shape.size() && i < 8; ++i) out += cat({i > 0 ? "," : " of ", shape[i]});
        return out;
    }
};

// === 6 Writing msgpack [3] ===========================================================================================

constexpr int max_depth = 32;

// Appends to a string, every number and length in its shortest form.
class Writer {
public:
    explicit Writer(string& out) : out_(out) {}
    void nil() { byte(0xC0); }
    void boolean(bool value) { byte(value ? 0xC3 : 0xC2); }
    void natural(uint64_t value) {
        if (value < 128) return byte(static_cast<unsigned>(value));
        const unsigned log = value < 0x100 ? 0 : value < 0x10000 ? 1 : value < 0x100000000 ? 2 : 3;
        byte(0xCC + log);
        big_endian(value, 1U << log);
    }
    void integer(int64_t value) {
        const auto bits = static_cast<uint64_t>(value);
        if (value >= 0) return natural(bits);
        if (value >= -32) return byte(static_cast<unsigned>(bits & 0xFF));
        const unsigned log = value >= -128 ? 0 : value >= -32768 ? 1 : value >= -2147483648LL ? 2 : 3;
        byte(0xD0 + log);
        big_endian(bits, 1U << log);
    }
    void real(double value) {
        uint64_t bits = 0;
        std::memcpy(&bits, &value, 8);
        byte(0xCB);
        big_endian(bits, 8);
    }
    Writer& str(string_view text) {
        if (!read_utf8(text, nullptr)) misuse({"a str that is no UTF-8: ", quote(text)});
        head(text.size(), 0xA0, 32, 0xD9);
        out_.append(text);
        return *this;
    }
    void bin(string_view data) {
        bin_head(data.size());
        out_.append(data);
    }
    void list(size_t count) { head(count, 0x90, 16, 0xDB); }
    void map(size_t count) { head(count, 0x80, 16, 0xDD); }
    // Append bytes as they are: the data of an array, or what another writer wrote.
    void raw(const void* data, size_t size) { out_.append(static_cast<const char*>(data), size); }
    // An array in three parts: open it with the size of its data, append them with `raw`, close it.
    void open_array(size_t bytes) {
        map(4);
        bin("__ndarray__");
        boolean(true);
        bin("data");
        bin_head(bytes);
    }
    void close_array(const Dtype& dtype, const Shape& shape) {
        bin("dtype");
        str(dtype.str());
        bin("shape");
        list(shape.size());
        for (const int64_t extent : shape) integer(extent);
    }
    void array(const Dtype& dtype, const Shape& shape, string_view data) {
        open_array(data.size());
        raw(data.data(), data.size());
        close_array(dtype, shape);
    }
    void value(const Value& value, int depth = 0) {
        if (depth >= max_depth && value.kind >= Kind::list) misuse({"nested deeper than ", max_depth, " levels"});
        switch (value.kind) {
            case Kind::nil:
                return nil();
            case Kind::boolean:
                return boolean(value.number != 0);
            case Kind::integer:
                return integer(value.number);
            case Kind::natural:
                return natural(static_cast<uint64_t>(value.number));
            case Kind::real:
                return real(value.real);
            case Kind::text:
                str(value.text);
                return;
            case Kind::bytes:
                return bin(value.text);
            case Kind::list:
                list(value.items.size());
                return items(value, depth);
            case Kind::map:
                map(value.items.size() / 2);
                return items(value, depth);
            case Kind::array:
                return array(value.dtype, value.shape, value.text);
            case Kind::scalar:
                map(3);
                bin("__npgeneric__");
                boolean(true);
                bin("data");
                items(value, depth);
                bin("dtype");
                str(value.dtype.str());
        }
    }

private:
    void items(const Value& value, int depth) {
        for (const Value& item : value.items) this->value(item, depth + 1);
    }
    void byte(unsigned value) { out_ += static_cast<char>(value); }
    void big_endian(uint64_t bits, unsigned bytes) {
        for (unsigned i = bytes; i > 0; --i) byte(static_cast<unsigned>(bits >> (8 * (i - 1)) & 0xFF));
    }
    void bin_head(size_t size) { head(size, 0, 0, 0xC4); }
    // Write a length: in the head byte `fix` if it is small enough, otherwise behind one. `wide` is the head for
    // lengths of 8 bits, those for 16 and 32 follow it. Lists and maps have none for 8 bits: `wide` is where it would
    // be.
    void head(size_t count, unsigned fix, size_t fix_below, unsigned wide) {
        if (count > 0xFFFFFFFF) misuse({"more than 2^32 - 1 bytes or items"});
        if (count < fix_below) return byte(fix + static_cast<unsigned>(count));
        const bool has_8_bits = wide < 0xDA;
        const unsigned log = count < 0x100 && has_8_bits ? 0 : count < 0x10000 ? 1 : 2;
        byte(wide + log);
        big_endian(count, 1U << log);
    }
    string& out_;
};
inline string encode(const Value& value) {
    string out;
    Writer(out).value(value);
    return out;
}

// === 7 Reading msgpack [3] ===========================================================================================

constexpr size_t max_items = 1000000;  // in a message
constexpr size_t max_keys = 1024;      // in one map, whose keys are compared with all others

// Everything a peer sends is bounded before it is believed: nesting, the number of items, every length.
class Reader {
public:
    explicit Reader(string_view bytes) : bytes_(bytes) {}
    size_t left() const { return bytes_.size() - at_; }
    Value value(int depth = 0) {
        const auto head = static_cast<uint8_t>(take(1)[0]);
        if (head < 0x80) return Value::of(Kind::integer, head);
        if (head < 0x90) return map(head & 0x0FU, depth);
        if (head < 0xA0) return list(head & 0x0FU, depth);
        if (head < 0xC0) return text(Kind::text, head & 0x1FU);
        if (head >= 0xE0) return Value::of(Kind::integer, head - 256);
        if (head == 0xC0) return {};
        if (head == 0xC2 || head == 0xC3) return Value::of(Kind::boolean, head - 0xC2);
        if (head >= 0xC4 && head <= 0xC6) return text(Kind::bytes, big_endian(1U << (head - 0xC4)));
        if (head == 0xCA || head == 0xCB) return real(head == 0xCA ? 4 : 8);
        if (head >= 0xCC && head <= 0xCF) {
            const auto number = static_cast<int64_t>(big_endian(1U << (head - 0xCC)));
            return Value::of(number < 0 ? Kind::natural : Kind::integer, number);
        }
        if (head >= 0xD0 && head <= 0xD3) {
            const uint32_t size = 1U << (head - 0xD0);
            return Value::of(Kind::integer, sign_extended(big_endian(size), size));
        }
        if (head >= 0xD9 && head <= 0xDB) return text(Kind::text, big_endian(1U << (head - 0xD9)));
        if (head == 0xDC || head == 0xDD) return list(big_endian(head == 0xDC ? 2 : 4), depth);
        if (head == 0xDE || head == 0xDF) return map(big_endian(head == 0xDE ? 2 : 4), depth);
        refuse("3", {"byte ", head, " is no msgpack, or an ext type"});
    }

private:
    string_view take(uint64_t count) {
        if (count > left()) refuse("3", {count, " bytes announced at offset ", at_, ", ", left(), " left"});
        const string_view taken = bytes_.substr(at_, static_cast<size_t>(count));
        at_ += taken.size();
        return taken;
    }
    uint64_t big_endian(uint32_t size) { return load_bits(take(size).data(), {'>', 'u', size}); }
    Value real(uint32_t size) {
        Value found = Value::of(Kind::real);
        found.real = load_real(take(size).data(), {'>', 'f', size});
        return found;
    }
    Value text(Kind kind, uint64_t count) {
        Value found = Value::of(kind);
        found.text = take(count);
        if (kind == Kind::text && !read_utf8(found.text, nullptr)) refuse("3", {"a str that is no UTF-8"});
        return found;
    }
    // Items count when they are announced, so that a nest of them is bounded in sum; each takes one byte at least.
    Value container(Kind kind, uint64_t count, int depth) {
        if (depth >= max_depth) refuse("3", {"nested deeper than ", max_depth, " levels"});
        items_ += count;
        if (count > left() || items_ > max_items) refuse("3", {count, " items announced, that is too many"});
        Value found = Value::of(kind);
        found.items.reserve(static_cast<size_t>(std::min<uint64_t>(count, 4096)));
        return found;
    }
    Value list(uint64_t count, int depth) {
        Value found = container(Kind::list, count, depth);
        for (uint64_t i = 0; i < count; ++i) found.items.push_back(value(depth + 1));
        return found;
    }
    Value map(uint64_t count, int depth) {
        if (count > max_keys) refuse("3", {"a map of ", count, " keys, at most ", max_keys, " are allowed"});
        Value found = container(Kind::map, 2 * count, depth);
        for (uint64_t i = 0; i < count; ++i) {
            Value key = value(depth + 1);
            if (!key.is(Kind::text) && !key.is(Kind::bytes)) {
                refuse("3", {"a map key is str or bin, not ", key.describe()});
            }
            if (found.find(key.text, key.kind) != nullptr) {
                refuse("3", {"map key ", quote(key.text), " stands twice"});
            }
            // An array is one level deep, its shape included.
            const bool is_list = left() > 0 && (bytes_[at_] & 0xF0) == 0x90;
            const bool is_shape = key.is(Kind::bytes) && key.text == "shape" && is_list;
            found.items.push_back(std::move(key));
            found.items.push_back(value(is_shape ? depth : depth + 1));
        }
        if (found.find("__ndarray__", Kind::bytes) != nullptr) return array(found);
        if (found.find("__npgeneric__", Kind::bytes) != nullptr) return scalar(found);
        if (is_other_dialect(found)) refuse("3", {"another numpy dialect, without bin keys"});
        return found;
    }
    // Whether a map looks like an array or a scalar of msgpack_numpy, or has our keys as str.
    static bool is_other_dialect(const Value& map) {
        for (const Kind kind : {Kind::text, Kind::bytes}) {
            if (map.find("data", kind) == nullptr) continue;
            if (map.find("nd", kind) != nullptr && map.find("type", kind) != nullptr) return true;
            for (const char* mark : {"__ndarray__", "__npgeneric__"}) {
                if (map.find(mark, kind) != nullptr && map.find("dtype", kind) != nullptr) return true;
            }
        }
        return false;
    }
    // Check the keys that arrays and scalars have in common, and begin the value.
    static Value marked(Kind kind, const Value& found, const char* mark, size_t keys) {
        const Value& first = *found.find(mark, Kind::bytes);
        if (!first.is(Kind::boolean) || first.number == 0) refuse("3", {mark, " is not true"});
        const Value* dtype = found.find("dtype", Kind::bytes);
        if (found.items.size() != 2 * keys || found.find("data", Kind::bytes) == nullptr || dtype == nullptr) {
            refuse("3", {mark, ": a key is missing, or too many"});
        }
        if (!dtype->is(Kind::text) && !dtype->is(Kind::bytes)) {
            refuse("3", {"a dtype is a str, not ", dtype->describe()});
        }
        Value out = Value::of(kind);
        out.dtype = Dtype::parse(dtype->text);
        return out;
    }
    static Value array(const Value& found) {
        Value out = marked(Kind::array, found, "__ndarray__", 4);
        const Value* shape = found.find("shape", Kind::bytes);
        const Value* data = found.find("data", Kind::bytes);
        if (shape == nullptr || !shape->is(Kind::list) || shape->items.size() > 32 || !data->is(Kind::bytes)) {
            refuse("3", {"an array has bin data and at most 32 extents"});
        }
        uint64_t product = out.dtype.size;  // as if no extent were 0: numpy cannot hold more either way
        bool empty = false;
        for (const Value& extent : shape->items) {
            if (!extent.is(Kind::integer) || extent.number < 0) refuse("3", {"a shape that holds ", extent.describe()});
            const auto length = static_cast<uint64_t>(std::max<int64_t>(extent.number, 1));
            if (product > (uint64_t{1} << 62) / length) refuse("3", {"a shape that is too large"});
            product *= length;
            empty = empty || extent.number == 0;
            out.shape.push_back(extent.number);
        }
        if (data->text.size() != (empty ? 0 : product)) {
            refuse("3", {out.describe(), " has ", data->text.size(), " bytes"});
        }
        out.text = data->text;
        if (out.dtype.kind == 'b') {
            for (char& flag : out.text) flag = flag != 0;
        }
        if (out.dtype.kind == 'U') {
            for (size_t at = 0; at < out.text.size(); at += 4) {
                const uint64_t point = load_bits(&out.text[at], {out.dtype.order, 'u', 4});
                if (!is_unicode(point)) refuse("3.4", {"no Unicode"});
            }
        }
        return out;
    }
    static Value scalar(const Value& found) {
        Value out = marked(Kind::scalar, found, "__npgeneric__", 3);
        const Value& data = *found.find("data", Kind::bytes);
        if (!fits(data, out.dtype)) refuse("3", {out.describe(), " of ", data.describe(), " that does not fit"});
        Value item = Value::of(data.kind, data.number);
        item.real = data.real;
        item.text = data.text;
        out.items.push_back(std::move(item));
        return out;
    }
    // Whether a numpy scalar of this dtype holds the value.
    static bool fits(const Value& data, const Dtype& dtype) {
        if (dtype.kind == 'U') {
            string points;
            return data.is(Kind::text) && read_utf8(data.text, &points) && points.size() <= dtype.size;
        }
        if (!data.is_number()) return data.is(Kind::boolean);
        const int bits = static_cast<int>(8 * dtype.size);
        const double whole = static_cast<double>(data.number) + (data.is(Kind::natural) ? 18446744073709551616.0 : 0.0);
        const double value = data.is(Kind::real) ? data.real : whole;
        if (dtype.kind == 'f') {  // what is rounded to the largest float of the size, or is none of the finite ones
            const double too_large = bits == 64 ? forever : bits == 32 ? 3.4028235677973366e38 : 65520.0;
            return !std::isfinite(value) || std::fabs(value) < too_large;
        }
        if (bits == 64 && !data.is(Kind::real)) return dtype.kind == 'i' ? data.is(Kind::integer) : value >= 0;
        if (value != std::trunc(value)) return false;
        if (dtype.kind == 'b') return value >= 0 && value < 2;
        if (dtype.kind == 'u') return value >= 0 && value < std::ldexp(1.0, bits);
        return value >= -std::ldexp(1.0, bits - 1) && value < std::ldexp(1.0, bits - 1);
    }

    string_view bytes_;
    size_t at_ = 0;
    uint64_t items_ = 0;
};
// Decode one message. Throws ProtocolError, whatever the bytes are.
inline Value decode(string_view bytes) {
    Reader reader(bytes);
    Value found = reader.value();
    if (reader.left() > 0) refuse("3", {reader.left(), " bytes behind the value"});
    return found;
}

// === 8 Frames (RFC 6455) =============================================================================================

enum class Op : uint8_t { continuation = 0, text = 1, binary = 2, close = 8, ping = 9, pong = 10 };

// A whole message, or a control frame; `payload` is valid until the reader is touched again.
struct Event {
    Op op = Op::binary;
    string_view payload;
};
// Append one whole frame, masked with `key` as a client has to.
inline void write_frame(string& out, Op op, string_view payload, uint32_t key) {
    const uint64_t size = payload.size();
    const unsigned wide = size < 126 ? 0 : size < 0x10000 ? 2 : 8;  // bytes of the length, where it has its own
    const uint64_t length = wide == 0 ? size : wide == 2 ? 126 : 127;
    out += static_cast<char>(0x80U | static_cast<unsigned>(op));
    out += static_cast<char>(0x80U | length);
    for (unsigned i = wide; i > 0; --i) out += static_cast<char>(size >> (8 * (i - 1)) & 0xFF);
    char mask[8];  // the key, twice
    std::memcpy(mask, &key, 4);
    std::memcpy(mask + 4, &key, 4);
    out.append(mask, 4);

    const size_t at = out.size();
    out.append(payload);
    char* const masked = &out[at];
    uint64_t mask_word = 0;
    std::memcpy(&mask_word, mask, 8);
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {  // eight bytes at a time: an image is large
        uint64_t word = 0;
        std::memcpy(&word, masked + i, 8);
        word ^= mask_word;
        std::memcpy(masked + i, &word, 8);
    }
    for (; i < size; ++i) masked[i] = static_cast<char>(masked[i] ^ mask[i % 8]);
}

// Cuts received bytes into events: ask `room` where to put them, tell `filled`, then call `next` until it is false.
class FrameReader {
public:
    explicit FrameReader(size_t max_message_bytes) : max_(max_message_bytes) {}
    // Where received bytes may be put, and how many.
    std::pair<char*, size_t> room() {
        if (begin_ > 0 && (begin_ == end_ || buffer_.size() - end_ < least)) {
            std::memmove(&buffer_[0], &buffer_[begin_], end_ - begin_);
            end_ -= begin_;
            begin_ = 0;
        }
        if (buffer_.size() - end_ < least) buffer_.resize(2 * std::max(buffer_.size(), least));
        return {&buffer_[end_], buffer_.size() - end_};
    }
    void filled(size_t count) { end_ += count; }
    // Whether a whole message is there, so that reading on may wait.
    bool full() const { return end_ - begin_ >= max_ && end_ - begin_ >= least; }
    // Take an HTTP header off the front, up to its empty line, or show what there is of it; false: more is needed.
    bool head(string& out) {
        out = buffer_.substr(0, end_);
        const size_t stop = out.find("\r\n\r\n");
        if (stop == string::npos) return false;
        out.resize(stop + 2);
        begin_ = stop + 4;
        return true;
    }
    // Take the next event; false: more bytes are needed.
    bool next(Event& event) {
        if (whole_) {
            message_.clear();
            whole_ = false;
        }
        for (Frame frame; take(frame);) {
            if (is_control(frame.op) || (frame.fin && !fragments_)) {
                event = {frame.op, frame.payload};
                return true;
            }
            if (!fragments_) op_ = frame.op;
            message_.append(frame.payload);
            fragments_ = !frame.fin;
            if (frame.fin) {
                whole_ = true;
                event = {op_, message_};
                return true;
            }
        }
        return false;
    }

private:
    struct Frame {
        Op op = Op::binary;
        bool fin = true;
        string_view payload;
    };
    static bool is_control(Op op) { return op >= Op::close; }
    // Take one frame, if it is there as a whole. Its head is judged as soon as that has come.
    bool take(Frame& frame) {
        if (end_ - begin_ < 2) return false;
        const char* head = &buffer_[begin_];
        const unsigned first = static_cast<uint8_t>(head[0]);
        uint64_t size = static_cast<uint8_t>(head[1]);
        frame.op = static_cast<Op>(first & 0x0F);
        frame.fin = (first & 0x80) != 0;
        const bool control = is_control(frame.op);
        if ((first & 0x70) != 0) refuse("1", {"reserved bits"});
        if (size >= 0x80) refuse("1", {"a masked frame from a server"});
        if (frame.op > Op::pong || (frame.op > Op::binary && !control)) {
            refuse("1", {"a frame with the opcode ", first & 0x0F});
        }
        if (control && (!frame.fin || size > 125)) refuse("1", {"a long or fragmented control frame"});

        const uint32_t wide = size < 126 ? 0 : size == 126 ? 2 : 8;
        if (end_ - begin_ < 2 + wide) return false;
        if (wide > 0) size = load_bits(head + 2, {'>', 'u', wide});
        if (!control) {
            const bool continues = frame.op == Op::continuation;
            if (continues && !fragments_) refuse("1", {"a continuation of nothing"});
            if (!continues && fragments_) refuse("1", {"a message inside another"});
            if (size > max_ - message_.size()) refuse("1", {"a message above ", max_, " bytes"}, 1009);
        }
        if (end_ - begin_ - 2 - wide < size) return false;
        frame.payload = string_view(head + 2 + wide, static_cast<size_t>(size));
        begin_ += 2 + wide + frame.payload.size();
        return true;
    }

    static constexpr size_t least = 1 << 16;
    size_t max_;
    string buffer_;  // received bytes: those from begin_ to end_ are yet to be read
    size_t begin_ = 0, end_ = 0;
    string message_;          // put together of fragments
    Op op_ = Op::binary;      // of its first fragment
    bool fragments_ = false;  // more of it is to come
    bool whole_ = false;      // it was handed out
};

// === 9 Options =======================================================================================================

using Seed = std::optional<uint64_t>;

// The names and defaults are those of the Python client's options; 0 seconds stand for "no limit", or no pings.
struct Options {
    string url = "ws://127.0.0.1:8000";
    string api_key;                          // empty: none is sent [1.2]
    Seed seed;                               // env j's first reset gets seed + first_env + j
    std::optional<uint32_t> rank;            // place among the clients of a run
    std::optional<uint64_t> first_env;       // index of env 0 in the whole run; not set: rank * envs
    std::optional<uint32_t> group_num_envs;  // envs of all clients that were started together; not set: our own
    bool reuse = true;                       // leave out observations that the server has [10.1]
    double connect_timeout = 300;            // seconds without a server after which to give up
    double ping_interval = 20;               // seconds between pings
    double ping_timeout = 60;                // seconds of silence allowed on top of it
    double send_timeout = 60;                // seconds in which the server must take a message
    double max_backoff = 5;                  // longest wait between two tries, in seconds
    size_t max_message_bytes = size_t{1} << 30;
    string client = "plugrl-cpp";
    string version = client_version;
    std::function<void(bool warning, const string& text)> log;  // called in run's thread
};

struct Url {
    string host, port, path;
    // Take ws://host[:port][/path] apart; an IPv6 address stands in brackets.
    static Url parse(const string& text) {
        bool ascii = true;
        for (const char c : text) ascii = ascii && is_printable(c) && c != ' ' && c != '@' && c != '#';
        if (text.compare(0, 6, "wss://") == 0) {
            misuse({"url ", quote(text), ": there is no TLS here; put a proxy beside it"});
        }
        if (!ascii || text.compare(0, 5, "ws://") != 0) {
            misuse({"url must be like ws://host:port/path, not ", quote(text)});
        }
        const size_t slash = std::min(text.find_first_of("/?", 5), text.size());
        Url url{text.substr(5, slash - 5), "80", text.substr(slash)};
        if (url.path.empty() || url.path[0] != '/') url.path.insert(0, 1, '/');
        const size_t bracket = url.host.find(']');
        const size_t colon = url.host.find(':', bracket == string::npos ? 0 : bracket);
        if (colon != string::npos) {
            url.port = url.host.substr(colon + 1);
            url.host.resize(colon);
        }
        const bool digits = url.port.find_first_not_of("0123456789") == string::npos && url.port.size() <= 5;
        const long port = digits ? std::strtol(url.port.c_str(), nullptr, 10) : 0;
        if (port < 1 || port > 65535) misuse({"url ", quote(text), ": a port is 1 to 65535"});
        if (url.host.empty() || (url.host[0] == '[') != (url.host.back() == ']')) {
            misuse({"url ", quote(text), ": no host"});
        }
        return url;
    }
};

// === 10 The connection: socket, handshake, ping and close ============================================================

inline double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline double limit(double seconds) {
    return seconds > 0 ? seconds : forever;
}

// Thrown where Client::stop was heard; it never leaves the client.
struct Stopped {};

// One WebSocket, driven by the thread that calls it. Waits are cut into slices, to hear a stop.
class Connection {
public:
    Connection(const Options& options, const std::atomic<bool>& stop)
        : options_(options), stop_(&stop), url_(Url::parse(options.url)), reader_(options.max_message_bytes) {}
    Connection(const Connection&) = delete;
    ~Connection() { hang_up(); }
    // Connect and shake hands until a moment of now_s. Throws HandshakeError, Stopped.
    void open(double deadline) {
        dial(deadline);
        shake_hands(deadline);
        pinged_at_ = now_s();
    }
    void queue(string_view message) { write_frame(out_, Op::binary, message, random_()); }
    // Send what is queued, in one go if the socket takes it. A lost connection shows at the next `receive`.
    void flush() { flush(now_s() + limit(options_.send_timeout)); }
    // Wait for a message; pings are answered meanwhile. Throws ConnectionClosed, ProtocolError, Stopped.
    Event receive(double timeout_s) {
        const double since = now_s();
        const double interval_s = limit(options_.ping_interval);
        const double silence_s = interval_s + limit(options_.ping_timeout);
        for (Event event;;) {
            const bool found = reader_.next(event);
            if (found && !handle(event)) return event;
            if (!found && ended_) throw ConnectionClosed("the connection ended: " + how_, 1006);
            if (stopping()) throw Stopped{};
            if (!found) wait_for_bytes();
            const double now = now_s();
            if (now - pinged_at_ >= interval_s) {
                pinged_at_ = now;
                write_frame(out_, Op::ping, "", random_());
                flush();
            }
            if (now - std::max(since, heard_at_) > silence_s) end("it was silent too long");
            if (now - since > timeout_s) end("no message in time");
        }
    }
    // Close with a code, and wait for the server to do the same, for at most two seconds.
    void close(int code, string_view reason) noexcept {
        try {
            const double deadline = now_s() + 2.0;
            stop_ = nullptr;
            send_close(code, reason);
            flush(deadline);
            ::shutdown(fd_, SHUT_WR);
            char unread[4096];
            while (!ended_ && now_s() < deadline) {
                wait(POLLIN, slice_s);
                const ssize_t count = ::recv(fd_, unread, sizeof unread, 0);
                ended_ = count == 0 || (count < 0 && !later());
            }
        } catch (...) {
            // No memory: the socket goes all the same.
        }
        hang_up();
    }

private:
    static constexpr double slice_s = 0.2;
    static constexpr double last_send_s = 0.5;  // what a message under way still gets after a stop
    static constexpr double look_s = 400e-6;    // longest look before sleeping

    // Whether the last call of the system is to be made again.
    static bool later() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }
    bool stopping() const { return stop_ != nullptr && stop_->load(); }
    void hang_up() {
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
        ended_ = true;
    }
    // Give the connection up, but read what came before, such as a close frame.
    void end(const char* how) {
        if (how_.empty()) how_ = how;
        const double until = now_s() + slice_s;
        while (!ended_ && !reader_.full() && now_s() < until) {
            if (!read()) break;
        }
        ended_ = true;
    }
    // Poll the socket; returns what it is ready for.
    int wait(int what, double seconds) const {
        pollfd one{fd_, static_cast<short>(what), 0};
        return ::poll(&one, 1, static_cast<int>(std::max(0.0, seconds) * 1000) + 1) > 0 ? one.revents : 0;
    }
    void flush(double deadline) {
        size_t sent = 0;
        while (sent < out_.size() && !ended_) {
            const ssize_t count = ::send(fd_, &out_[sent], out_.size() - sent, MSG_NOSIGNAL);
            if (count >= 0) {
                sent += static_cast<size_t>(count);
                continue;
            }
            if (!later()) {
                end("sending failed");
                break;
            }
            if (stopping()) deadline = std::min(deadline, now_s() + last_send_s);
            if (now_s() > deadline) {
                end("it does not read");
                break;
            }
            const int what = reader_.full() ? POLLOUT : POLLIN | POLLOUT;  // who writes first must not wait for us
            if ((wait(what, slice_s) & POLLIN) != 0) read();
        }
        out_.clear();
    }
    // Read what is there, without waiting for it; false if there is nothing.
    bool read() {
        const auto [place, size] = reader_.room();
        const ssize_t count = ::recv(fd_, place, size, 0);
        if (count > 0) {
            reader_.filled(static_cast<size_t>(count));
            heard_at_ = now_s();
            return true;
        }
        if (count < 0 && later()) return false;
        if (how_.empty()) how_ = count == 0 ? "no close frame came" : std::strerror(errno);
        ended_ = true;
        return false;
    }
    // Where waits are short, look for the bytes before sleeping for them: to be woken takes longer than such a wait.
    void wait_for_bytes() {
        const double began = now_s();
        const double patience_s = expected_s_ > look_s ? 0 : std::min(look_s, 1.5 * expected_s_ + look_s / 8);
        bool found = read();
        while (!found && !ended_ && now_s() - began < patience_s) {
            ::sched_yield();
            found = read();
        }
        if (!found && !ended_) {
            wait(POLLIN, slice_s);
            read();
        }
        expected_s_ += 0.25 * (std::min(now_s() - began, 4 * look_s) - expected_s_);
    }
    // Do what a control frame asks; false for a message, which is the caller's.
    bool handle(const Event& event) {
        if (event.op == Op::close) handle_close(event.payload);
        if (event.op == Op::ping && !ended_) {
            write_frame(out_, Op::pong, event.payload, random_());
            flush();
        }
        return event.op == Op::ping || event.op == Op::pong;
    }
    [[noreturn]] void handle_close(string_view payload) {
        int code = 1005;  // RFC 6455's word for "none"
        string reason;
        if (!payload.empty()) {
            code = payload.size() == 1 ? 0 : static_cast<int>(load_bits(payload.data(), {'>', 'u', 2}));
            reason = payload.substr(std::min<size_t>(2, payload.size()));
            const bool reserved = code == 1004 || code == 1005 || code == 1006 || (code > 1014 && code < 3000);
            if (code < 1000 || code > 4999 || reserved) refuse("7", {"a close frame with the code ", code});
            if (!read_utf8(reason, nullptr)) refuse("7", {"a close reason that is no UTF-8"}, 1007);
        }
        send_close(payload.empty() ? 1000 : code, "");
        throw ConnectionClosed(cat({"the server closed with ", code, " ", quote(reason)}), code, reason);
    }
    void send_close(int code, string_view reason) {
        if (close_sent_) return;
        string payload = {static_cast<char>(code >> 8), static_cast<char>(code & 255)};
        for (const char c : reason.substr(0, 120)) payload += is_printable(c) ? c : '?';
        write_frame(out_, Op::close, payload, random_());
        close_sent_ = true;
    }

    [[noreturn]] void fail(Pieces why, int status = 0) const {
        throw HandshakeError(cat({"cannot reach ", options_.url, ": ", cat(why)}), status);
    }
    void dial(double deadline) {
        string host = url_.host;
        if (host[0] == '[') host = host.substr(1, host.size() - 2);
        addrinfo hints{};
        hints.ai_socktype = SOCK_STREAM;
        addrinfo* list = nullptr;
        const int found = ::getaddrinfo(host.c_str(), url_.port.c_str(), &hints, &list);
        if (found != 0) fail({::gai_strerror(found), "; check the host name"});
        const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, ::freeaddrinfo);
        int status = 0;
        for (const addrinfo* address = list; address != nullptr && ended_; address = address->ai_next) {
            status = connect(*address, deadline);
            ended_ = status != 0;
        }
        if (ended_) fail({std::strerror(status), "; is a training server running there?"});
    }
    // Connect to one address; returns 0, or the error of the system.
    int connect(const addrinfo& address, double deadline) {
        hang_up();
        fd_ = ::socket(address.ai_family, address.ai_socktype, address.ai_protocol);
        if (fd_ < 0) return errno;
        set_options();
        int status = ::connect(fd_, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
        while (status == EINPROGRESS || status == EINTR) {
            if (stopping()) throw Stopped{};
            const double left_s = deadline - now_s();
            if (left_s < 0) return ETIMEDOUT;
            socklen_t size = sizeof status;
            if (wait(POLLOUT, std::min(slice_s, left_s)) != 0) {
                ::getsockopt(fd_, SOL_SOCKET, SO_ERROR, &status, &size);
            }
        }
        return status;
    }
    void set_option(int level, int option, int value) const { ::setsockopt(fd_, level, option, &value, sizeof value); }
    void set_options() const {  // those that the system does not have are passed over
        ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL, 0) | O_NONBLOCK);
        ::fcntl(fd_, F_SETFD, FD_CLOEXEC);
        set_option(IPPROTO_TCP, TCP_NODELAY, 1);  // a small message behind another one waits 40 ms otherwise
        set_option(SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef SO_NOSIGPIPE
        set_option(SOL_SOCKET, SO_NOSIGPIPE, 1);
#endif
    }
    void shake_hands(double deadline) {
        string nonce;
        while (nonce.size() < 16) nonce += static_cast<char>(random_() & 0xFF);
        const string key = base64(nonce);
        out_ = cat({"GET ", url_.path, " HTTP/1.1\r\nHost: ", url_.host, ":", url_.port, "\r\nUpgrade: websocket\r\n",
                    "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: ", key,
                    options_.api_key.empty() ? "" : "\r\nAuthorization: Api-Key ", options_.api_key, "\r\n\r\n"});
        flush(deadline);

        string head;
        while (!reader_.head(head)) {
            if (stopping()) throw Stopped{};
            if (ended_) fail({"it ended during the handshake: ", how_});
            if (head.size() > 1 << 16) fail({"its header has no end"});
            const double left_s = deadline - now_s();
            if (left_s < 0) fail({"the handshake took too long"});
            wait(POLLIN, std::min(slice_s, left_s));
            read();
        }
        const bool http = head.size() > 12 && head.compare(0, 7, "HTTP/1.") == 0;
        const long number = http ? std::strtol(head.c_str() + 9, nullptr, 10) : 0;
        const int status = static_cast<int>(std::clamp(number, 0L, 1000L));
        if (status == 401) fail({"HTTP status 401: it wants its api_key"}, status);
        const string shown = quote(head);
        if (status != 101) {
            fail({"HTTP status ", status, ": it answers ", shown, "; is it a training server?"}, status);
        }
        if (!is_upgrade(head, accept_of(key))) fail({"it is no WebSocket server, it answers ", shown});
    }
    // Whether an HTTP header switches to a WebSocket without extensions, and knows our key.
    static bool is_upgrade(const string& head, const string& accept) {
        string tight, small;  // without spaces; in small letters too
        for (const char c : head) {
            if (c == ' ' || c == '\t') continue;
            tight += c;
            small += c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
        }
        const auto at = [&small](const char* text, size_t from = 0) { return small.find(text, from); };
        const string accept_name = "\r\nsec-websocket-accept:";
        const size_t key = small.find(accept_name);
        if (key == string::npos) return false;
        if (tight.compare(key + accept_name.size(), accept.size() + 2, accept + "\r\n") != 0) return false;
        if (at("\r\nupgrade:websocket\r\n") == string::npos) return false;
        if (at("\r\nsec-websocket-extensions:") != string::npos) return false;
        for (size_t line = at("\r\nconnection:"); line != string::npos; line = at("\r\nconnection:", line + 2)) {
            if (at("upgrade", line) < at("\r\n", line + 2)) return true;
        }
        return false;
    }

    const Options& options_;
    const std::atomic<bool>* stop_;  // null once the connection is being closed
    Url url_;
    FrameReader reader_;
    string out_;  // frames that are yet to be sent
    std::random_device random_;
    int fd_ = -1;
    bool ended_ = true;
    string how_;  // why it ended
    bool close_sent_ = false;
    double heard_at_ = 0, pinged_at_ = 0;  // moments of now_s
    double expected_s_ = look_s;           // how long bytes let us wait, about
};

// === 11 Environments: what authors write =============================================================================

// A space of Gymnasium; make one with the functions below.
struct Space {
    const char* type = "Box";
    Dtype dtype;
    Shape shape;                   // of one env's value; empty for discrete and text
    std::vector<int64_t> numbers;  // discrete: n and start; multi_discrete: n of each; text: the longest length
    string low, high;  // box: bounds as bytes of the dtype, of one element or of all; text: low is the charset

    size_t count() const {
        size_t product = 1;
        for (const int64_t extent : shape) product *= static_cast<size_t>(extent);
        return product;
    }
    // Bytes of one env's value in its row.
    size_t bytes() const { return is_text() ? 0 : count() * dtype.size; }
    // 32-bit words of one env's value in a digest.
    size_t words() const {
        if (dtype.kind == 'f') return count();
        return is_text() ? static_cast<size_t>(numbers[0]) : (bytes() + 3) / 4;
    }
    bool is_box() const { return !high.empty(); }
    bool is_text() const { return dtype.kind == 'U'; }
    bool is_discrete() const { return numbers.size() == 2 && shape.empty(); }
    bool is_image() const { return is_box() && dtype == Dtype::of<uint8_t>() && shape.size() == 3 && shape[2] <= 4; }
};
// Box of T (float, double, an int type); a bound of one element stands for all.
template <class T>
Space box(const Shape& shape, std::initializer_list<T> low, std::initializer_list<T> high) {
    static_assert(!std::is_same_v<T, bool>, "flags are a multi_binary space");
    Space space{"Box", Dtype::of<T>(), shape, {}, {}, {}};
    space.low.assign(reinterpret_cast<const char*>(low.begin()), low.size() * sizeof(T));
    space.high.assign(reinterpret_cast<const char*>(high.begin()), high.size() * sizeof(T));
    for (const size_t given : {low.size(), high.size()}) {
        if (given != 1 && given != space.count()) misuse({"box: a bound has one element, or all"});
    }
    return space;
}
template <class T>
Space box(const Shape& shape, T low, T high) {
    return box<T>(shape, {low}, {high});
}
inline Space image(int64_t height, int64_t width, int64_t channels) {
    return box<uint8_t>({height, width, channels}, 0, 255);
}
inline Space discrete(int64_t n, int64_t start = 0) {
    return {"Discrete", Dtype::of<int64_t>(), {}, {n, start}, {}, {}};
}
inline Space multi_discrete(const Shape& n) {
    return {"MultiDiscrete", Dtype::of<int64_t>(), {static_cast<int64_t>(n.size())}, n, {}, {}};
}
inline Space multi_binary(int64_t n) {
    return {"MultiBinary", Dtype::of<std::int8_t>(), {n}, {}, {}, {}};
}
inline Space text(int64_t max_length, const string& charset) {
    return {"Text", Dtype::text(1), {}, {max_length}, charset, {}};
}

// An entry of the observation. A lone entry without a name is an observation that is no dict; it travels as "obs".
struct Entry {
    string name;
    Space space;
    size_t offset = 0, word = 0;  // filled in by the client: where it stands in a row, in a digest
};
// What an env is; all envs of a client have the same.
struct Spec {
    std::vector<Entry> observation;
    Space action;
    string env_id;                  // empty: not told
    int64_t max_episode_steps = 0;  // 0: not told
};
// One env's place in a batch.
struct Row {
    int64_t index = 0;
    // Its observation.
    string data;  // its entries one after another, each at a multiple of 8 bytes
    string text;  // UTF-32 of this machine
    // Its running episode.
    int64_t chunks = 0, length = 0;
    double ret = 0;      // the sum of the rewards
    uint64_t chain = 0;  // the digests of its steps, chained [step-digest]
    // Its last chunk.
    double reward = 0;
    float narrow = 0;  // the reward again
    bool terminated = false, truncated = false, success = false;
    bool ended = false;  // terminated or truncated
    bool known = false;  // its last feedback may stand for its next observation [10.1]
    // What the server asks of it.
    bool resetting = false;
    Seed seed;
    const Value* options = nullptr;
};

// Where one env writes what it observes; entries are counted in the order of the spec.
class Observation {
public:
    Observation(const Spec& spec, Row& row) : spec_(spec), row_(row) {}
    // The place of an entry's elements, in C order: T is the type of its space. Good for drawing images into.
    template <class T>
    T* at(size_t entry) {
        return static_cast<T*>(place(entry, Dtype::of<T>(), any));
    }
    template <class T>
    void set(size_t entry, const T* values, size_t count) {
        void* const to = place(entry, Dtype::of<T>(), count);
        if (count > 0) std::memcpy(to, values, count * sizeof(T));
    }
    template <class T>
    void set(size_t entry, std::initializer_list<T> values) {
        set(entry, values.begin(), values.size());
    }
    template <class T>
    void set(size_t entry, const std::vector<T>& values) {
        set(entry, values.data(), values.size());
    }
    void set_text(size_t entry, string_view utf8) {
        place(entry, Dtype::text(1), any);
        const auto longest = static_cast<size_t>(spec_.observation[entry].space.numbers[0]);
        string points;
        if (!read_utf8(utf8, &points) || points.size() / 4 > longest) {
            misuse({"entry ", entry, ": ", quote(utf8), " is no UTF-8, or too long"});
        }
        row_.text = points;
    }

private:
    static constexpr size_t any = static_cast<size_t>(-1);  // a count that is not given
    void* place(size_t entry, const Dtype& dtype, size_t count) const {
        if (entry >= spec_.observation.size()) misuse({"the observation has no entry ", entry});
        const Entry& one = spec_.observation[entry];
        const size_t wanted = one.space.count();
        if (count == any) count = wanted;
        if (!(one.space.dtype == dtype) || count != wanted) {
            misuse({"entry ", entry, " has ", wanted, " of ", one.space.dtype.str(), ", got ", count, " of ",
                    dtype.str()});
        }
        return row_.data.data() + one.offset;
    }
    const Spec& spec_;
    Row& row_;
};
// One env's action of one step: as many elements as the action space has, in the dtype that the trainer sends.
struct Action {
    const char* data;
    Dtype dtype;
    size_t size;
    bool is_float32() const { return dtype.kind == 'f' && dtype.size == 4; }
    double operator[](size_t i) const { return load_real(at(i), dtype); }
    // The element as an integer, rounded: what Discrete, MultiDiscrete and MultiBinary actions are.
    int64_t integer(size_t i) const {
        int64_t value = 0;
        if (!load_integer(at(i), dtype, value)) misuse({"element ", i, " of the action is no 64-bit integer"});
        return value;
    }
    const char* at(size_t i) const {
        if (i >= size) misuse({"the action has ", size, " elements, none at ", i});
        return data + i * dtype.size;
    }
};
// What a step brought, beside the observation.
struct Step {
    double reward = 0;
    bool terminated = false;  // an end of the task itself
    bool truncated = false;   // a limit of time
    bool success = false;     // read where the episode ended
};
// An environment. Whatever it throws ends the client with EnvFailed.
class Env {
public:
    virtual ~Env() = default;
    virtual Spec spec() const = 0;
    // Begin an episode and write its first observation. Without a seed the random stream runs on.
    virtual void reset(const Seed& seed, Observation& first) = 0;
    // Take one step and write the observation after it, also on the episode's last step. It never resets by itself.
    virtual Step step(const Action& action, Observation& next) = 0;
    // Hear the options, a map, that a trainer gave to the reset that follows.
    virtual void options(const Value& options) { static_cast<void>(options); }
};
using Envs = std::vector<std::unique_ptr<Env>>;

// === 12 The digest of a step [step-digest] ===========================================================================

// The sum of a row of 32-bit words, each times the key of its place: what an env took and gave in one step, or at a
// reset.
struct Digest {
    uint64_t sum = 0;
    uint64_t words = 0;  // how many came before the next one

    void word(uint64_t value) {
        ++words;
        uint64_t key = words * 0x9E3779B97F4A7C15;  // SplitMix64 from state 0
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9;
        key = (key ^ key >> 27) * 0x94D049BB133111EB;
        key = (key ^ key >> 31) | 1;
        sum += key * (value & 0xFFFFFFFF);
    }
    void real(double wide) {
        const auto narrow = static_cast<float>(wide);
        uint32_t bits = 0;
        std::memcpy(&bits, &narrow, 4);
        word(bits);
    }
    // Add the values of an entry of a space: floats as float32, all others as their bytes in the dtype of the space.
    void add(const Dtype& space, string_view data, const Dtype& dtype) {
        if (space.kind == 'f') {
            for (size_t at = 0; at < data.size(); at += dtype.size) real(load_real(&data[at], dtype));
        } else if (dtype == space && space.order != '>') {
            for (size_t at = 0; at < data.size(); at += 4) {
                const auto width = static_cast<uint32_t>(std::min<size_t>(4, data.size() - at));
                word(load_bits(&data[at], {'<', 'u', width}));
            }
        } else {
            add_converted(space, data, dtype);
        }
    }

private:
    void add_converted(const Dtype& space, string_view data, const Dtype& dtype) {
        const uint64_t mask = ~uint64_t{0} >> (64 - 8 * space.size);
        uint64_t packed = 0;
        uint32_t bits = 0;  // that are in it
        for (size_t at = 0; at < data.size(); at += dtype.size) {
            int64_t whole = 0;
            if (dtype.kind == 'f') {
                whole = static_cast<int64_t>(load_real(&data[at], dtype));
            } else {
                load_integer(&data[at], dtype, whole);
            }
            packed |= (static_cast<uint64_t>(whole) & mask) << bits;
            bits += 8 * space.size;
            for (; bits >= 32; bits -= 32) {
                word(packed);
                packed >>= 32;
            }
        }
        if (bits > 0) word(packed);
    }
};

// === 13 The batch of envs: those of a connection =====================================================================

class Batch {
public:
    explicit Batch(Envs envs) : rows(envs.size()), envs_(std::move(envs)) {
        if (rows.empty()) misuse({"a client has one env at least"});
        string first;
        for (size_t i = 0; i < rows.size(); ++i) {
            if (envs_[i] == nullptr) misuse({"env ", i, " is null"});
            spec = envs_[i]->spec();
            string described;
            write_spec(described, 0);
            if (i == 0) first = described;
            if (described != first) misuse({"the envs have one spec, but env ", i, " has another than env 0"});
        }
        const size_t size = place_entries();
        for (size_t i = 0; i < rows.size(); ++i) {
            rows[i].index = static_cast<int64_t>(i);
            rows[i].data.resize(size);
            all.push_back(i);
        }
    }
    Spec spec;
    std::vector<Row> rows;
    Rows all;  // 0 … n-1
    int64_t steps = 0;
    bool digests = false;  // whether the server wants those of the steps

    void reset(Row& row, const Seed& seed, const Value* options = nullptr) {
        call(row, nullptr, seed, options);
        row.chunks = 0;
        row.length = 0;
        row.ret = 0;
        row.chain = digest(row, nullptr, 0);
    }
    // Run one chunk [H, n, *da] for some envs, step by step; an env's part of it ends with its episode.
    void step(const Value& action, const Rows& who) {
        const size_t horizon = checked_horizon(action);
        const size_t n = rows.size(), width = spec.action.count();
        for (const size_t i : who) {
            rows[i].ended = false;
            rows[i].reward = -0.0;  // -0 + x is x, 0 + -0 is not
            ++rows[i].chunks;
        }
        for (size_t k = 0; k < horizon; ++k) {
            for (const size_t i : who) {
                if (!rows[i].ended) step(rows[i], {action.at((k * n + i) * width), action.dtype, width});
            }
        }
        for (const size_t i : who) {
            rows[i].ret += rows[i].reward;
            rows[i].narrow = static_cast<float>(rows[i].reward);
        }
    }
    // Write a key and an array with one number of each env.
    template <class T>
    void column(Writer& out, const char* name, const Rows& who, T Row::* member) const {
        column(out, name, who, Dtype::of<T>(), reinterpret_cast<const char*>(&(rows[0].*member)));
    }
    void observation(Writer& out, const Rows& who) const {
        out.map(3);
        out.str("images");
        entries(out, who, true);
        out.str("states");
        entries(out, who, false);
        size_t width = 4;
        for (const size_t i : who) width = std::max(width, rows[i].text.size());
        string texts;
        for (const size_t i : who) {
            texts += rows[i].text;
            texts.append(width - rows[i].text.size(), '\0');
        }
        const Dtype dtype = Dtype::text(static_cast<uint32_t>(width / 4));
        out.str("text").array(dtype, {static_cast<int64_t>(who.size())}, texts);
    }
    // Write the env-spec map as far as the envs know it; `others` is how many keys will follow.
    void write_spec(string& bytes, unsigned others) const {
        check_spec();
        const bool has_id = !spec.env_id.empty(), has_limit = spec.max_episode_steps > 0;
        Writer out(bytes);
        out.map(2U + others + has_id + has_limit);
        out.str("observation_space");
        if (is_bare()) {
            write_space(out, spec.observation[0].space);
        } else {
            out.map(2);
            out.str("type").str("Dict");
            out.str("spaces").map(spec.observation.size());
            for (const Entry& one : spec.observation) write_space(out.str(one.name), one.space);
        }
        write_space(out.str("action_space"), spec.action);
        if (has_id) out.str("env_id").str(spec.env_id);
        if (has_limit) out.str("max_episode_steps").integer(spec.max_episode_steps);
    }

private:
    // `first` is where the number of row 0 stands; those of the others stand at the same place of their rows.
    void column(Writer& out, const char* name, const Rows& who, const Dtype& dtype, const char* first) const {
        out.str(name).open_array(who.size() * dtype.size);
        for (const size_t i : who) out.raw(first + i * sizeof(Row), dtype.size);
        out.close_array(dtype, {static_cast<int64_t>(who.size())});
    }
    // Whether the observation is that of a lone entry, without a dict around it.
    bool is_bare() const { return spec.observation.size() == 1 && spec.observation[0].name.empty(); }
    // Say where each entry stands in a row and in a digest; returns the bytes of a row.
    size_t place_entries() {
        size_t size = 32;  // more than a string keeps inside of itself, where nothing need be aligned
        for (Entry& one : spec.observation) {
            one.offset = size;
            size += (one.space.bytes() + 7) / 8 * 8;
            for (const Entry& other : spec.observation) {
                if (other.name < one.name) one.word += other.space.words();
            }
        }
        return size;
    }
    void check_spec() const {
        const std::vector<Entry>& entries = spec.observation;
        bool good = !entries.empty() && !spec.action.is_text();
        bool sound = usable(spec.action) && spec.action.count() > 0;
        for (const Entry& one : entries) {
            sound = sound && usable(one.space);
            good = good && (is_bare() || !one.name.empty());
            for (const Entry& other : entries) {
                const bool alike = one.name == other.name || (one.space.is_text() && other.space.is_text());
                good = good && (&one == &other || !alike);
            }
        }
        if (!good) misuse({"a spec has entries of different names, at most one text, none for action"});
        if (!sound) misuse({"a space has no bounds or length, no action, or an extent below 0 or of 256 MiB"});
    }
    static bool usable(const Space& space) {
        uint64_t size = space.dtype.size;
        for (const int64_t extent : space.shape) {
            const auto length = static_cast<uint64_t>(std::max<int64_t>(extent, 1));
            if (extent < 0 || size > (uint64_t{1} << 28) / length) return false;
            size *= length;
        }
        if (space.is_text()) return !space.numbers.empty() && space.numbers[0] >= 0;
        if (string_view(space.type) != "Box") return true;
        for (const size_t bound : {space.low.size(), space.high.size()}) {
            if (bound == 0 || (bound != space.dtype.size && bound != space.bytes())) return false;
        }
        return true;
    }
    static void write_space(Writer& out, const Space& space) {
        if (space.is_text()) {
            out.map(4);
            out.str("type").str(space.type);
            out.str("min_length").integer(0);
            out.str("max_length").integer(space.numbers[0]);
            out.str("charset").str(space.low);
        } else if (space.is_discrete()) {
            out.map(3);
            out.str("type").str(space.type);
            out.str("n").integer(space.numbers[0]);
            out.str("start").integer(space.numbers[1]);
        } else if (!space.numbers.empty()) {
            out.map(2);
            out.str("type").str(space.type);
            out.str("nvec").open_array(space.numbers.size() * 8);
            out.raw(space.numbers.data(), space.numbers.size() * 8);
            out.close_array(space.dtype, space.shape);
        } else {
            out.map(space.is_box() ? 5 : 2);
            out.str("type").str(space.type);
            out.str("shape").list(space.shape.size());
            for (const int64_t extent : space.shape) out.integer(extent);
            if (!space.is_box()) return;
            out.str("dtype").str(space.dtype.str());
            write_bound(out.str("low"), space, space.low);
            write_bound(out.str("high"), space, space.high);
        }
    }
    static void write_bound(Writer& out, const Space& space, const string& bound) {
        out.array(space.dtype, bound.size() == space.dtype.size ? Shape{1} : space.shape, bound);
    }
    // Write the map of the entries that are images, or of those that are not.
    void entries(Writer& out, const Rows& who, bool images) const {
        const auto belongs = [images](const Entry& one) {
            return !one.space.is_text() && one.space.is_image() == images;
        };
        const auto count = std::count_if(spec.observation.begin(), spec.observation.end(), belongs);
        out.map(static_cast<size_t>(count));
        for (const Entry& one : spec.observation) {
            if (!belongs(one)) continue;
            const size_t bytes = one.space.bytes();
            Shape shape{static_cast<int64_t>(who.size())};
            shape.insert(shape.end(), one.space.shape.begin(), one.space.shape.end());
            out.str(one.name.empty() ? "obs" : one.name).open_array(who.size() * bytes);
            for (const size_t i : who) out.raw(rows[i].data.data() + one.offset, bytes);
            out.close_array(one.space.dtype, shape);
        }
    }
    // The steps of a chunk that has an action for each env and step, of integers where the space has such.
    size_t checked_horizon(const Value& action) const {
        const auto horizon = static_cast<size_t>(action.shape[0]);
        const size_t width = spec.action.count(), per_step = rows.size() * width;
        if (action.count() / per_step != horizon || action.count() % per_step != 0) {  // a product could wrap
            refuse("5.3", {action.describe(), ": one action has ", width, " elements"});
        }
        int64_t whole = 0;
        for (size_t i = 0; spec.action.dtype.kind != 'f' && i < action.count(); ++i) {
            if (!load_integer(action.at(i), action.dtype, whole)) refuse("5.3", {"action: no 64-bit integer"});
        }
        return horizon;
    }
    void step(Row& row, const Action& action) {
        const Step done = call(row, &action, {}, nullptr);
        row.reward += done.reward;
        row.terminated = done.terminated;
        row.truncated = done.truncated;
        row.ended = done.terminated || done.truncated;
        row.success = row.ended && done.success;
        ++row.length;
        ++steps;
        if (digests) row.chain = digest(row, &action, done.reward) + row.chain * 0xD1342543DE82EF95;
    }
    // Have an env take a step, or with no action a reset. What it throws becomes an EnvFailed, in which it is nested.
    Step call(Row& row, const Action* action, const Seed& seed, const Value* options) {
        Env& env = *envs_[static_cast<size_t>(row.index)];
        Observation observation(spec, row);
        const char* name = action != nullptr ? "step" : "reset";
        try {
            if (action != nullptr) return env.step(*action, observation);
            if (options != nullptr) env.options(*options);
            env.reset(seed, observation);
            return {};
        } catch (const std::exception& error) {
            failed(row, name, error.what());
        } catch (...) {
            failed(row, name, "no std::exception");
        }
    }
    [[noreturn]] void failed(const Row& row, const char* name, const char* why) const {
        std::throw_with_nested(
            EnvFailed(cat({"env ", row.index, " (", spec.env_id, ") failed in ", name, "(): ", why})));
    }
    // The digest of one step, or with no action of a reset.
    uint64_t digest(const Row& row, const Action* action, double reward) const {
        Digest digest;
        digest.word(action == nullptr ? 4U : row.terminated + 2U * row.truncated);
        digest.real(reward);
        if (action != nullptr) {
            const string_view data(action->data, action->size * action->dtype.size);
            digest.add(spec.action.dtype, data, action->dtype);
        }
        for (const Entry& one : spec.observation) {
            const string_view plain(&row.data[one.offset], one.space.bytes());
            digest.words = 2 + spec.action.words() + one.word;
            digest.add(one.space.dtype, one.space.is_text() ? string_view(row.text) : plain, one.space.dtype);
        }
        return digest.sum;
    }
    Envs envs_;
};

// === 14 The session: who may say what when [4] =======================================================================

// One connection's state: bytes of the server in, messages for it out. There is no socket in here.
class Session {
public:
    enum class State : uint8_t { metadata, infer, action, feedback };  // what is due

    explicit Session(Batch& batch) : batch_(batch) {
        for (Row& row : batch_.rows) {
            row.known = false;
            row.resetting = false;
        }
    }
    State state() const { return state_; }
    // The value of a key of the metadata's `data`; null if it is not known.
    const Value* metadata(string_view key) const {
        const Value* data = metadata_.find("data");
        return data != nullptr ? data->find(key) : nullptr;
    }
    // The last action, [H, n, *da]; whom to reset instead stands in the rows.
    const Value& action() const { return *action_; }
    bool offers(string_view feature) const {
        const Value* features = metadata("features");
        if (features == nullptr || !features->is(Kind::list)) return false;
        for (const Value& one : features->items) {
            if (one.is(Kind::text) && one.text == feature) return true;
        }
        return false;
    }
    // Take in one message of the server: metadata first, then an action for each infer.
    void receive(string_view bytes) {
        Value message = decode(bytes);
        const Value* type = message.find("message_type");
        const string name = type != nullptr && type->is(Kind::text) ? type->text : "nothing";
        if (name != "metadata" && name != "action" && name != "infer" && name != "feedback") {
            refuse("2", {message.describe(), ", message_type ", quote(name), ", expected metadata or action"});
        }
        const char* due = state_ == State::metadata ? "metadata" : state_ == State::action ? "action" : "nothing";
        if (name != due) refuse("4.2", {name, " came, ", due, " was due"});
        if (state_ == State::metadata) {
            const Value* data = message.find("data");
            if (data != nullptr && !data->is(Kind::map)) {
                refuse("5.1", {"metadata: data is a map, not ", data->describe()});
            }
            metadata_ = std::move(message);
            batch_.digests = offers("step-digest") && offers("env-spec");  // we announce it in our env_spec
            state_ = State::infer;
        } else {
            message_ = std::move(message);
            read_action();
            state_ = State::feedback;
        }
    }
    // Write an infer for all envs [5.2]; with `reuse` it leaves out what the server has [10.1]. `env_spec` may be
    // empty.
    void infer(string& bytes, bool reuse, const string& env_spec) {
        if (state_ != State::infer) misuse({"an infer is not due"});
        const Rows& all = batch_.all;
        Rows unknown;
        for (const size_t i : all) {
            if (!batch_.rows[i].known) unknown.push_back(i);
        }
        reuse = reuse && unknown.size() < all.size() && offers("reuse-feedback-obs");
        Writer out(bytes);
        out.map(4U + reuse + !env_spec.empty() + batch_.digests);
        out.str("message_type").str("infer");
        out.str("data");
        batch_.observation(out, reuse ? unknown : all);
        batch_.column(out, "env_indices", all, &Row::index);
        batch_.column(out, "step_ids", all, &Row::chunks);
        if (reuse) batch_.column(out, "reuse", all, &Row::known);
        if (!env_spec.empty()) out.str("env_spec").raw(env_spec.data(), env_spec.size());
        if (batch_.digests) batch_.column(out, "digest", all, &Row::chain);
        state_ = State::action;
    }
    // Write the feedback of the envs that were stepped [5.4].
    void feedback(string& bytes, const Rows& who) {
        if (state_ != State::feedback) misuse({"a feedback is not due"});
        Writer out(bytes);
        out.map(4U + batch_.digests);
        out.str("message_type").str("feedback");
        batch_.column(out, "env_indices", who, &Row::index);
        batch_.column(out, "step_ids", who, &Row::chunks);
        if (batch_.digests) batch_.column(out, "digest", who, &Row::chain);
        out.str("data").map(5);
        out.str("obs");
        batch_.observation(out, who);
        if (offers("env-spec")) {
            batch_.column(out, "rewards", who, &Row::reward);
        } else {
            batch_.column(out, "rewards", who, &Row::narrow);  // float32 is the custom
        }
        batch_.column(out, "terminated", who, &Row::terminated);
        batch_.column(out, "truncated", who, &Row::truncated);
        write_info(out, who);
        for (const size_t i : who) batch_.rows[i].known = !batch_.rows[i].ended;
        state_ = State::infer;
    }

private:
    // Write the info: of episodes, where one ended.
    void write_info(Writer& out, const Rows& who) const {
        const bool any = std::any_of(who.begin(), who.end(), [&](size_t i) { return batch_.rows[i].ended; });
        out.str("info").map(any ? 1 : 0);
        if (!any) return;
        out.str("episode").map(4);
        batch_.column(out, "r", who, &Row::ret);
        batch_.column(out, "l", who, &Row::length);
        batch_.column(out, "s", who, &Row::success);
        batch_.column(out, "mask", who, &Row::ended);
    }
    // Read names of our envs, none of them twice.
    Rows names(const Value* value, const char* clause) const {
        if (value == nullptr || !value->is(Kind::array) || value->shape.size() != 1 || !value->dtype.is_int()) {
            refuse(clause, {"action: env_ids is a 1-d int array, not ", value != nullptr ? value->describe() : "none"});
        }
        Rows found;
        std::vector<char> seen(batch_.rows.size());
        for (size_t i = 0; i < value->count(); ++i) {
            int64_t name = -1;
            const bool is_int = load_integer(value->at(i), value->dtype, name);
            const auto place = static_cast<size_t>(name);
            if (!is_int || name < 0 || place >= seen.size() || seen[place] != 0) {
                refuse(clause, {"action: env_ids has a stranger, or one twice"});
            }
            seen[place] = 1;
            found.push_back(place);
        }
        return found;
    }
    void read_action() {
        const auto n = static_cast<int64_t>(batch_.rows.size());
        const Value* data = message_.find("data");
        action_ = data != nullptr ? data->find("action") : nullptr;
        const bool is_array = action_ != nullptr && action_->is(Kind::array) && action_->dtype.kind != 'U';
        if (!is_array || action_->shape.size() < 2 || action_->shape[0] < 1 || action_->shape[1] != n) {
            refuse("5.3", {"action: data.action must be a numeric array [H, ", n, ", *da] with H of at least 1, got ",
                           action_ != nullptr ? action_->describe() : "none"});
        }
        const Value* ids = data->find("env_ids");
        if (ids != nullptr && names(ids, "5.3") != batch_.all) {
            refuse("5.3", {"action: env_ids are not those of the infer"});
        }
        const Value* horizon = metadata("action_horizon");
        if (horizon != nullptr && horizon->is(Kind::integer) && action_->shape[0] > horizon->number) {
            refuse("5.1", {"action: ", action_->shape[0], " steps, but the horizon is ", horizon->number});
        }
        for (Row& row : batch_.rows) {
            row.resetting = false;
            row.seed.reset();
            row.options = nullptr;
        }
        const Value* reset = message_.find("reset");
        if (reset != nullptr && !reset->is(Kind::nil)) read_resets(*reset);
    }
    void read_resets(const Value& reset) {
        const char* clause = "seeded-reset";
        if (!offers(clause)) refuse(clause, {"action: a reset, which was not offered"});
        const Rows who = names(reset.find("env_ids"), clause);
        const Value* seeds = reset.find("seed");
        const Value* options = reset.find("options");
        if (options != nullptr && (!options->is(Kind::list) || options->items.size() != who.size())) {
            refuse(clause, {"action: reset.options", one_per_env, options->describe()});
        }
        for (size_t at = 0; at < who.size(); ++at) {
            Row& row = batch_.rows[who[at]];
            row.resetting = true;
            row.known = false;
            if (seeds != nullptr) row.seed = seed_of(*seeds, at, who.size());
            if (options == nullptr) continue;
            const Value& item = options->items[at];
            if (item.is(Kind::map)) {
                row.options = &item;
            } else if (!item.is(Kind::nil)) {
                refuse(clause, {"action: options are maps, not ", item.describe()});
            }
        }
    }
    // One env's seed: of a list, whose items may be nil, or of an int array.
    static Seed seed_of(const Value& seeds, size_t at, size_t count) {
        const char* clause = "seeded-reset";
        if (seeds.is(Kind::list) && seeds.items.size() == count) {
            const Value& item = seeds.items[at];
            if (item.is(Kind::nil)) return {};
            if (item.is(Kind::natural) || (item.is(Kind::integer) && item.number >= 0)) {
                return static_cast<uint64_t>(item.number);
            }
            refuse(clause, {"action: a seed is 0 or more, or nil, not ", item.describe()});
        }
        const bool is_array = seeds.is(Kind::array) && seeds.dtype.is_int() && seeds.shape.size() == 1;
        if (!is_array || seeds.count() != count) {
            refuse(clause, {"action: reset.seed", one_per_env, seeds.describe()});
        }
        int64_t number = 0;
        const bool is_signed = load_integer(seeds.at(at), seeds.dtype, number);
        if (is_signed && number < 0) refuse(clause, {"action: a seed is 0 or more, not ", number});
        return static_cast<uint64_t>(number);
    }

    static constexpr const char* one_per_env = " must be a list of one item per env, got ";
    Batch& batch_;
    State state_ = State::metadata;
    Value metadata_, message_;
    const Value* action_ = nullptr;  // in message_
};

// === 15 The client ===================================================================================================

struct Summary {
    int64_t episodes = 0, steps = 0, reconnects = 0;
    double total_return = 0;      // of all finished episodes
    std::vector<double> returns;  // of the last finished ones, 1000 at most, oldest first
    bool stopped = false;         // by Client::stop; otherwise the server said that the run is over [7.1]
};

class Client {
public:
    Client(Options options, Envs envs) : options_(std::move(options)), batch_(std::move(envs)) {
        check_options();
        batch_.write_spec(env_spec_, 5U + options_.rank.has_value());
        const size_t n = batch_.all.size();
        Writer out(env_spec_);
        out.str("num_envs").natural(n);
        out.str("group_num_envs").natural(options_.group_num_envs ? *options_.group_num_envs : n);
        out.str("features").list(4);
        out.str("reuse-feedback-obs").str("env-spec").str("seeded-reset").str("step-digest");
        out.str("client").str(options_.client);
        out.str("client_version").str(options_.version);
        if (options_.rank) out.str("rank").natural(*options_.rank);
    }
    // End `run` soon, with close code 1000 [7.5]: from any thread, or from a signal handler. A chunk is waited for.
    void stop() noexcept { stop_.store(true); }
    const Summary& summary() const { return summary_; }
    // Serve until the server says that the run is over, or `stop` is called. A lost connection is made again [7.6].
    // Throws EnvFailed, ConnectTimeout; HandshakeError for 401 and 403; ProtocolError for a text frame [7.4].
    const Summary& run() {
        const uint64_t first = options_.first_env.value_or(uint64_t{options_.rank.value_or(0)} * batch_.all.size());
        for (Row& row : batch_.rows) {
            Seed seed;
            if (options_.seed) seed = *options_.seed + first + static_cast<uint64_t>(row.index);
            batch_.reset(row, seed);
        }
        try {
            string error;
            while (attempt(error)) pause(error);
        } catch (const Stopped&) {
            summary_.stopped = true;
        }
        return summary_;
    }

private:
    void check_options() const {
        Url::parse(options_.url);
        for (const double seconds : {options_.connect_timeout, options_.ping_interval, options_.ping_timeout,
                                     options_.send_timeout, options_.max_backoff}) {
            if (!(seconds >= 0 && seconds < 1e9)) misuse({"timeouts are seconds, 0 or more"});
        }
        for (const char c : options_.api_key) {
            if (c == ' ' || !is_printable(c)) misuse({"api_key is printable ASCII without spaces"});
        }
    }
    void log(bool warning, const string& text) const {
        if (options_.log) options_.log(warning, text);
    }
    double remaining_s() const { return std::max(0.0, limit(options_.connect_timeout) - without_server_s_); }
    // Connect once, serve for as long as it lasts, close as its end demands; true: come back, because of `error`.
    bool attempt(string& error) {
        if (stop_.load()) throw Stopped{};
        const double began = now_s();
        connected_at_ = 0;
        bool over = false;
        Connection connection(options_, stop_);
        try {
            connection.open(began + std::max(1.0, std::min(10.0, remaining_s())));
            exchange(connection);
        } catch (const HandshakeError& refused) {
            if (refused.code == 401 || refused.code == 403) throw;
            error = refused.what();
        } catch (const ConnectionClosed& closed) {
            connection.close(1000, "");
            if (stop_.load()) throw Stopped{};
            error = cat({options_.url, ": ", closed.what()});
            over = closed.code == 1001 && closed.detail == "plugrl-server-stop";
        } catch (const ProtocolError& broken) {
            connection.close(broken.code, broken.what());
            if (broken.detail == "7.4") throw;
            error = cat({options_.url, " broke a rule: ", broken.what()});
        } catch (const Stopped&) {
            connection.close(1000, "");
            throw;
        } catch (...) {
            connection.close(1011, "env failed");
            throw;
        }
        const bool was_connected = connected_at_ != 0;
        if (!was_connected) {
            without_server_s_ += now_s() - began;
        } else if (now_s() - connected_at_ >= std::max(5.0, options_.max_backoff)) {
            tries_ = 0;
            without_server_s_ = 0;
        }
        if (over) {
            const bool soon = batch_.steps == 0;
            log(soon, soon ? "the run is over so soon: see the server's log" : "the run is over");
        } else if (was_connected) {
            ++summary_.reconnects;
        }
        return !over;
    }
    // Metadata, then infer, action, feedback for as long as the connection lasts: it returns only by throwing.
    [[noreturn]] void exchange(Connection& connection) {
        Session session(batch_);
        receive(connection, session, std::min(30.0, remaining_s()));
        connected_at_ = now_s();
        const Value* server = session.metadata("server");
        log(false,
            cat({"connected to ", options_.url, ", server ", quote(server != nullptr ? server->text : "unknown")}));
        string out;
        session.infer(out, options_.reuse, session.offers("env-spec") ? env_spec_ : "");
        for (;;) {
            connection.queue(out);
            out.clear();
            if (stop_.load()) throw Stopped{};
            connection.flush();  // a feedback and the infer behind it in one send
            receive(connection, session, forever);
            Rows stepping;
            for (const size_t i : batch_.all) {
                if (!batch_.rows[i].resetting) stepping.push_back(i);
            }
            batch_.step(session.action(), stepping);
            summary_.steps = batch_.steps;
            session.feedback(out, stepping);
            connection.queue(out);
            out.clear();
            begin_episodes();
            session.infer(out, options_.reuse, "");
        }
    }
    void receive(Connection& connection, Session& session, double timeout_s) const {
        const Event event = connection.receive(timeout_s);
        if (event.op == Op::text) refuse("7.4", {options_.url, " sent a text frame: no training server"}, 1003);
        session.receive(event.payload);
    }
    // Reset the envs that the server wants to have reset, and those whose episode ended, which is counted.
    void begin_episodes() {
        for (Row& row : batch_.rows) {
            if (row.resetting) {
                batch_.reset(row, row.seed, row.options);
            } else if (row.ended) {
                if (summary_.returns.size() == 1000) summary_.returns.erase(summary_.returns.begin());
                summary_.returns.push_back(row.ret);
                summary_.total_return += row.ret;
                ++summary_.episodes;
                batch_.reset(row, Seed());
            }
        }
    }
    // Wait until the next try, longer from try to try and jittered; or give up.
    void pause(const string& error) {
        ++tries_;
        if (remaining_s() <= 0) {
            throw ConnectTimeout(cat({"no server at ", options_.url, " for ", static_cast<int>(without_server_s_),
                                      " s (", tries_, " tries); the last one: ", error}));
        }
        const double jitter = 0.5 + 0.5 * static_cast<double>(std::random_device()()) / 4294967296.0;
        const double longest = std::min(options_.max_backoff, 0.2 * std::ldexp(1.0, std::min(tries_ - 1, 60)));
        const double wait_s = std::min(remaining_s(), jitter * longest);
        const bool is_power_of_two = (tries_ & (tries_ - 1)) == 0;
        if (connected_at_ != 0 || is_power_of_two) {  // waiting for a trainer that starts is said less and less
            log(true, cat({error, "; trying again (", tries_, " so far)"}));
        }
        const double until = now_s() + wait_s;
        for (double left = wait_s; left > 0; left = until - now_s()) {
            if (stop_.load()) throw Stopped{};
            ::poll(nullptr, 0, static_cast<int>(std::min(0.1, left) * 1000) + 1);
        }
        without_server_s_ += wait_s;
    }

    const Options options_;
    Batch batch_;
    string env_spec_;  // as it is sent
    Summary summary_;
    std::atomic<bool> stop_{false};
    static_assert(std::atomic<bool>::is_always_lock_free, "for signal handlers");
    int tries_ = 0;
    double without_server_s_ = 0;  // since the last connection that held
    double connected_at_ = 0;      // 0: the last try brought no metadata
};

inline Summary run(Options options, Envs envs) {
    return Client(std::move(options), std::move(envs)).run();
}

}  // namespace plugrl

#endif

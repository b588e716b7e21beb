// An env client for PlugRL wire protocol version 1 in one header: C++17, the standard library, POSIX sockets.
// Derive from plugrl::Env (spec, reset, step), then call plugrl::run. docs/cpp-client.md is the manual, docs/protocol.md
// the protocol; numbers in brackets are its clauses. Linux and macOS, no TLS (wss://). One thread does it all: pings wait
// while an env steps, which is allowed [1]. Nothing is printed: errors are exceptions, news goes to Options::log.
//
//    1 Errors          4 Dtypes           7 Reading msgpack  10 The connection                       13 The batch of envs
//    2 Text            5 Values           8 Frames           11 Environments: what authors write     14 The session: who may say what
//    3 SHA-1, base64   6 Writing msgpack  9 Options          12 The digest of a step                 15 The client
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
#include <vector>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // SO_NOSIGPIPE does it
#endif
namespace plugrl {
constexpr const char* client_version = "0.1.0"; constexpr double forever = std::numeric_limits<double>::infinity();
using std::size_t, std::int64_t, std::uint8_t, std::uint32_t, std::uint64_t, std::string, std::string_view;
using Shape = std::vector<int64_t>; using Rows = std::vector<size_t>;

// === 1 Errors ========================================================================================================
// Each says what was expected and what came. `code` is an HTTP status or a close code, `detail` a clause or a close reason.
struct Error : public std::runtime_error {
    explicit Error(const string& text, int number = 0, const string& more = "") : runtime_error(text), code(number), detail(more) {}
    int code; string detail;
};
struct UsageError : public Error { using Error::Error; };        // an option, a spec or an observation of ours is unusable
struct EnvFailed : public Error { using Error::Error; };         // an env threw; its exception is nested in this one
struct ConnectTimeout : public Error { using Error::Error; };    // no server for Options::connect_timeout seconds
struct HandshakeError : public Error { using Error::Error; };    // the connection did not open; code: of HTTP, or 0
struct ConnectionClosed : public Error { using Error::Error; };  // it ended; code and reason, 1006 without a close frame
struct ProtocolError : public Error { using Error::Error; };     // the server broke this clause; 7.4 is a text frame
// === 2 Text ==========================================================================================================
struct Piece {
    Piece(const char* piece) : text(piece) {}
    Piece(const string& piece) : text(piece.c_str()) {}
    template <class T, class = std::enable_if_t<std::is_integral_v<T>>> Piece(T value) : number(static_cast<long long>(value)) {}
    const char* text = nullptr; long long number = 0;
};
using Pieces = std::initializer_list<Piece>;
inline string cat(Pieces pieces) {
    string out;
    for (const Piece& piece : pieces) {
        char digits[24];
        std::snprintf(digits, sizeof digits, "%lld", piece.number); out += piece.text != nullptr ? piece.text : digits;
    }
    return out;
}
[[noreturn]] inline void refuse(const char* clause, Pieces pieces, int close_code = 1002) {
    throw ProtocolError(cat({"[", clause, "] ", cat(pieces)}), close_code, clause);
}
[[noreturn]] inline void misuse(Pieces pieces) { throw UsageError(cat(pieces)); }
inline string quote(string_view text) {  // what a peer sent, for an error text: short, and printable
    string out = "'";
    for (const char c : text.substr(0, 200)) out += c >= ' ' && c <= '~' ? c : '?';
    return out + "'";
}
inline bool is_unicode(uint64_t point) { return point < 0xD800 || (point >= 0xE000 && point <= 0x10FFFF); }
// Read UTF-8; false if it is none. `utf32`, unless it is null, gets code points of four bytes, in this machine's order.
inline bool read_utf8(string_view in, string* utf32) {
    for (size_t at = 0, length = 0; at < in.size(); at += length) {
        const auto head = static_cast<uint8_t>(in[at]);
        length = head < 0x80 ? 1 : head < 0xC2 ? 0 : head < 0xE0 ? 2 : head < 0xF0 ? 3 : head < 0xF5 ? 4 : 0;
        if (length == 0 || length > in.size() - at) return false;
        uint32_t point = length == 1 ? head : head & (0x7FU >> length);
        for (size_t i = 1; i < length; ++i) {
            if ((in[at + i] & 0xC0) != 0x80) return false;
            point = point << 6 | (static_cast<uint8_t>(in[at + i]) & 0x3FU);
        }
        if ((length == 3 && point < 0x800) || (length == 4 && point < 0x10000) || !is_unicode(point)) return false;
        if (utf32 != nullptr) utf32->append(reinterpret_cast<const char*>(&point), 4);
    }
    return true;
}
// === 3 SHA-1 and base64, for the handshake of RFC 6455 ===============================================================
inline string sha1(string_view text) {
    uint32_t state[5] = {0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0};
    const auto rotate = [](uint32_t x, unsigned by) { return x << by | x >> (32 - by); };
    string padded(text); padded += '\x80'; padded.resize((padded.size() + 71) / 64 * 64 - 8);
    for (unsigned i = 8; i > 0; --i) padded += static_cast<char>(uint64_t{text.size()} * 8 >> (8 * i - 8) & 0xFF);
    for (size_t block = 0; block < padded.size(); block += 64) {
        uint32_t w[80] = {}, a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
        for (size_t i = 0; i < 64; ++i) w[i / 4] = w[i / 4] << 8 | static_cast<uint8_t>(padded[block + i]);
        for (size_t i = 16; i < 80; ++i) w[i] = rotate(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 1);
        for (size_t i = 0; i < 80; ++i) {
            uint32_t next = i < 20 ? (b & c) | (~b & d) : i < 40 || i >= 60 ? b ^ c ^ d : (b & c) | (b & d) | (c & d);
            next += rotate(a, 5) + e + w[i] + (i < 20 ? 0x5A827999 : i < 40 ? 0x6ED9EBA1 : i < 60 ? 0x8F1BBCDC : 0xCA62C1D6);
            e = d, d = c, c = rotate(b, 30), b = a, a = next;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d, state[4] += e;
    }
    string digest;
    for (size_t i = 0; i < 20; ++i) digest += static_cast<char>(state[i / 4] >> (24 - 8 * (i % 4)) & 0xFF);
    return digest;
}
inline string base64(string_view data) {
    const char* letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"; string out;
    for (size_t at = 0; at < data.size(); at += 3) {
        const size_t left = std::min<size_t>(3, data.size() - at); uint32_t bits = 0;
        for (size_t i = 0; i < 3; ++i) bits = bits << 8 | (i < left ? static_cast<uint8_t>(data[at + i]) : 0U);
        for (size_t i = 0; i < 4; ++i) out += i <= left ? letters[bits >> (18 - 6 * i) & 63] : '=';
    }
    return out;
}
inline string accept_of(const string& key) { return base64(sha1(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11")); }
// === 4 Dtypes [3] ====================================================================================================
// A numpy typestr: byte order `<`, `>` or `|`; kind b, i, u, f or U; bytes per item.
struct Dtype {
    char order = '|', kind = 'u'; uint32_t size = 1;
    template <class T> static Dtype of() {
        static_assert(std::is_arithmetic_v<T> && sizeof(T) <= 8, "the wire carries bool, ints, float and double");
        constexpr char sign = std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
        return {sizeof(T) == 1 ? '|' : native(), std::is_same_v<T, bool> ? 'b' : sign, sizeof(T)};
    }
    static Dtype parse(const string& typestr) {
        const char order = typestr.size() > 2 ? typestr[0] : '?', kind = typestr.size() > 2 ? typestr[1] : '?';
        const bool digits = order != '?' && typestr.size() < 9 && typestr.find_first_not_of("0123456789", 2) == string::npos;
        const auto size = static_cast<uint32_t>(digits && typestr[2] != '0' ? std::strtol(&typestr[2], nullptr, 10) : 0);
        const char* sizes = kind == 'b' ? "1" : kind == 'f' ? "248" : kind == 'i' || kind == 'u' ? "1248" : "";
        const bool number = size > 0 && size < 10 && std::strchr(sizes, static_cast<int>('0' + size)) != nullptr;
        if (size > 0 && (number || (kind == 'U' && order != '|')) && (order == '<' || order == '>' || (order == '|' && size == 1)))
            return {order, kind, kind == 'U' ? 4 * size : size};
        refuse("3", {"dtype ", quote(typestr), " is refused: expected such as <f4, |b1 or <U8"});
    }
    static char native() { const uint32_t probe = '<' | '>' << 24; return *reinterpret_cast<const char*>(&probe); }
    string str() const { const char name[] = {order, kind, '\0'}; return cat({name, kind == 'U' ? size / 4 : size}); }
    [[gnu::always_inline]] bool is_int() const { return kind == 'i' || kind == 'u'; }
    bool operator==(const Dtype& other) const { return order == other.order && kind == other.kind && size == other.size; }
};
inline uint64_t load_bits(const char* at, const Dtype& dtype) {
    uint64_t bits = 0;
    for (uint32_t i = 0; i < dtype.size; ++i) bits = bits << 8 | static_cast<uint8_t>(at[dtype.order == '>' ? i : dtype.size - 1 - i]);
    return bits;
}
inline int64_t sign_extended(uint64_t bits, size_t bytes) { return static_cast<int64_t>(bits << (64 - 8 * bytes)) >> (64 - 8 * bytes); }
// Read one number as a double: exact for every float, and for ints up to 2^53.
inline double load_real(const char* at, const Dtype& dtype) {
    const uint64_t bits = load_bits(at, dtype);
    if (dtype.kind == 'i') return static_cast<double>(sign_extended(bits, dtype.size));
    if (dtype.kind != 'f') return static_cast<double>(bits);
    const auto narrow = static_cast<uint32_t>(bits); double wide = 0; float single = 0;
    std::memcpy(&wide, &bits, 8), std::memcpy(&single, &narrow, 4);
    if (dtype.size != 2) return dtype.size == 8 ? wide : static_cast<double>(single);
    const int exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 1023);
    double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25);
    if (exponent == 31) size = fraction > 0 ? std::numeric_limits<double>::quiet_NaN() : forever;
    return (bits & 0x8000) != 0 ? -size : size;
}
// Read one number as an integer, floats rounded half to even; false if it is none of 64 bits.
inline bool load_integer(const char* at, const Dtype& dtype, int64_t& out) {
    const uint64_t bits = load_bits(at, dtype);
    out = dtype.kind == 'i' ? sign_extended(bits, dtype.size) : static_cast<int64_t>(bits);
    if (dtype.kind != 'f') return dtype.kind == 'i' || out >= 0;
    const double value = std::nearbyint(load_real(at, dtype));
    const bool fits = value >= -9223372036854775808.0 && value < 9223372036854775808.0;
    if (fits) out = static_cast<int64_t>(value);
    return fits;
}
// === 5 Values ========================================================================================================
enum class Kind : uint8_t { nil, boolean, integer, natural, real, text, bytes, list, map, array, scalar };
// What msgpack carries, and arrays. Which members mean something depends on the kind.
struct Value {
    Value() = default; Value(const Value&) = default; Value(Value&&) noexcept = default; [[gnu::noinline]] ~Value() = default;
    Value& operator=(const Value&) = default; Value& operator=(Value&&) noexcept = default;
    Kind kind = Kind::nil;
    Dtype dtype;               // array, scalar
    int64_t number = 0; double real = 0;  // boolean, integer; natural (above 2^63 - 1): its bits
    string text;               // text (UTF-8), bytes; array: its data in C order
    std::vector<Value> items;  // list; map: key, value, key, value …; scalar: its one number or text
    Shape shape;               // array
    static Value of(Kind kind, int64_t number = 0) { Value value; value.kind = kind, value.number = number; return value; }
    bool is(Kind wanted) const { return kind == wanted; }
    size_t count() const { return text.size() / dtype.size; }                // elements of an array
    const char* at(size_t i) const { return text.data() + i * dtype.size; }  // one of them
    // Find the value of a map's key; null if there is none, or if this is no map.
    const Value* find(string_view key, Kind key_kind = Kind::text) const {
        for (size_t i = 0; kind == Kind::map && i + 1 < items.size(); i += 2)
            if (items[i].kind == key_kind && items[i].text == key) return &items[i + 1];
        return nullptr;
    }
    string describe() const {
        static const char* const names[] = {"nil", "a bool", "an int", "an int", "a float", "a str", "a bin", "a list",
                                            "a map", "an array ", "a numpy scalar "};
        string out = cat({names[static_cast<size_t>(kind)], kind >= Kind::array ? dtype.str() : ""});
        for (size_t i = 0; i < shape.size() && i < 8; ++i) out = cat({out, i > 0 ? "," : " of ", shape[i]});
        return out;
    }
};
// === 6 Writing msgpack [3] ===========================================================================================
constexpr int max_depth = 32;
class Writer {
public:
    explicit Writer(string& out) : out_(out) {}
    void byte(unsigned value) { out_ += static_cast<char>(value); }
    void natural(uint64_t value) {
        const unsigned log = value < 0x100 ? 0 : value < 0x10000 ? 1 : value < 0x100000000 ? 2 : 3;
        if (value >= 128) byte(0xCC + log);
        big_endian(value, 1U << log);
    }
    void integer(int64_t value) {
        const auto bits = static_cast<uint64_t>(value);
        if (value >= 0) return natural(bits);
        const unsigned log = value >= -128 ? 0 : value >= -32768 ? 1 : value >= -2147483648LL ? 2 : 3;
        if (value < -32) byte(0xD0 + log);
        big_endian(bits, 1U << log);
    }
    void real(double value) { uint64_t bits = 0; std::memcpy(&bits, &value, 8); byte(0xCB), big_endian(bits, 8); }
    Writer& str(string_view text) {
        if (!read_utf8(text, nullptr)) misuse({"a str that is no UTF-8: ", quote(text)});
        head(text.size(), 0xA0, 32, 0xD9), out_.append(text); return *this;
    }
    void bin(string_view data) { head(data.size(), 0, 0, 0xC4), out_.append(data); }
    [[gnu::always_inline]] void list(size_t count) { head(count, 0x90, 16, 0xDB); }
    [[gnu::always_inline]] void map(size_t count) { head(count, 0x80, 16, 0xDD); }
    [[gnu::always_inline]] void raw(const void* data, size_t size) { out_.append(static_cast<const char*>(data), size); }
    // An array in three parts: open it with the size of its data, append them with `raw`, close it.
    void open_array(size_t bytes) { map(4), bin("__ndarray__"), byte(0xC3), bin("data"), head(bytes, 0, 0, 0xC4); }
    void close_array(const Dtype& dtype, const Shape& shape) {
        bin("dtype"), str(dtype.str()), bin("shape"), list(shape.size());
        for (const int64_t extent : shape) integer(extent);
    }
    void value(const Value& value, int depth = 0) {
        if (depth >= max_depth && value.kind >= Kind::list) misuse({"nested deeper than ", max_depth, " levels"});
        switch (value.kind) {
            case Kind::nil: return byte(0xC0);
            case Kind::boolean: return byte(value.number != 0 ? 0xC3 : 0xC2);
            case Kind::integer: return integer(value.number);
            case Kind::natural: return natural(static_cast<uint64_t>(value.number));
            case Kind::real: return real(value.real);
            case Kind::text: str(value.text); return;
            case Kind::bytes: return bin(value.text);
            case Kind::list: list(value.items.size()); break;
            case Kind::map: map(value.items.size() / 2); break;
            case Kind::array: open_array(value.text.size()), raw(value.text.data(), value.text.size());
                return close_array(value.dtype, value.shape);
            case Kind::scalar: map(3), bin("__npgeneric__"), byte(0xC3), bin("data"), this->value(value.items.at(0), depth + 1);
                bin("dtype"), str(value.dtype.str()); return;
        }
        for (const Value& item : value.items) this->value(item, depth + 1);
    }
private:
    void big_endian(uint64_t bits, unsigned bytes) {
        for (unsigned i = bytes; i > 0; --i) byte(static_cast<unsigned>(bits >> (8 * (i - 1)) & 0xFF));
    }
    // `wide` is the form with a length of 8 bits; lists and maps have none, theirs stands where it would be.
    void head(size_t count, unsigned fix, size_t fix_below, unsigned wide) {
        if (count > 0xFFFFFFFF) misuse({"more than 2^32 - 1 bytes or items"});
        if (count < fix_below) return byte(fix + static_cast<unsigned>(count));
        const unsigned log = count < 0x100 && wide < 0xDA ? 0 : count < 0x10000 ? 1 : 2;
        byte(wide + log), big_endian(count, 1U << log);
    }
    string& out_;
};
inline string encode(const Value& value) { string out; Writer(out).value(value); return out; }
// === 7 Reading msgpack [3] ===========================================================================================
// Everything a peer sends is bounded before it is believed: nesting, the number of items, every length.
constexpr size_t max_items = 1000000, max_keys = 1024;  // in a message; in one map, whose keys are compared with all
struct Reader {
    string_view bytes_; size_t at_ = 0; uint64_t items_ = 0;
    size_t left() const { return bytes_.size() - at_; }
    string_view take(uint64_t count) {
        if (count > left()) refuse("3", {count, " bytes announced at offset ", at_, ", ", left(), " left"});
        at_ += static_cast<size_t>(count);
        return bytes_.substr(at_ - static_cast<size_t>(count), static_cast<size_t>(count));
    }
    uint64_t big_endian(uint32_t size) { return load_bits(take(size).data(), {'>', 'u', size}); }
    Value value(int depth) {
        const auto head = static_cast<uint8_t>(take(1)[0]);
        if (head < 0x80 || head >= 0xE0) return Value::of(Kind::integer, head < 0x80 ? head : head - 256);
        if (head < 0x90) return map(head & 0x0FU, depth);
        if (head < 0xA0) return list(head & 0x0FU, depth);
        if (head < 0xC0) return text(Kind::text, head & 0x1FU);
        if (head == 0xC0) return {};
        if (head == 0xC2 || head == 0xC3) return Value::of(Kind::boolean, head - 0xC2);
        if (head >= 0xC4 && head <= 0xC6) return text(Kind::bytes, big_endian(1U << (head - 0xC4)));
        if (head == 0xCA || head == 0xCB) {
            const uint32_t size = head == 0xCA ? 4 : 8; Value found = Value::of(Kind::real);
            found.real = load_real(take(size).data(), {'>', 'f', size}); return found;
        }
        if (head >= 0xCC && head <= 0xD3) {
            const uint32_t size = 1U << (head & 3); const uint64_t bits = big_endian(size);
            const int64_t number = head >= 0xD0 ? sign_extended(bits, size) : static_cast<int64_t>(bits);
            return Value::of(head < 0xD0 && number < 0 ? Kind::natural : Kind::integer, number);
        }
        if (head >= 0xD9 && head <= 0xDB) return text(Kind::text, big_endian(1U << (head - 0xD9)));
        if (head == 0xDC || head == 0xDD) return list(big_endian(head == 0xDC ? 2 : 4), depth);
        if (head == 0xDE || head == 0xDF) return map(big_endian(head == 0xDE ? 2 : 4), depth);
        refuse("3", {"byte ", head, " is no msgpack, or an ext type"});
    }
    Value text(Kind kind, uint64_t count) {
        Value found = Value::of(kind); found.text = take(count);
        if (kind == Kind::text && !read_utf8(found.text, nullptr)) refuse("3", {"a str that is no UTF-8"});
        return found;
    }
    // Items count when they are announced, so that a nest of them is bounded in sum; each takes one byte at least.
    Value room(Kind kind, uint64_t count, int depth) {
        if (depth >= max_depth) refuse("3", {"nested deeper than ", max_depth, " levels"});
        if (count > left() || (items_ += count) > max_items) refuse("3", {count, " items announced, that is too many"});
        Value found = Value::of(kind);
        found.items.reserve(static_cast<size_t>(std::min<uint64_t>(count, 4096)));
        return found;
    }
    Value list(uint64_t count, int depth) {
        Value found = room(Kind::list, count, depth);
        for (uint64_t i = 0; i < count; ++i) found.items.push_back(value(depth + 1));
        return found;
    }
    Value map(uint64_t count, int depth) {
        if (count > max_keys) refuse("3", {"a map of ", count, " keys, at most ", max_keys, " are allowed"});
        Value found = room(Kind::map, 2 * count, depth);
        for (uint64_t i = 0; i < count; ++i) {
            Value key = value(depth + 1);
            if (!key.is(Kind::text) && !key.is(Kind::bytes)) refuse("3", {"a map key is str or bin, not ", key.describe()});
            if (found.find(key.text, key.kind) != nullptr) refuse("3", {"map key ", quote(key.text), " stands twice"});
            // An array is one level deep, its shape included.
            const bool flat = key.is(Kind::bytes) && key.text == "shape" && left() > 0 && (bytes_[at_] & 0xF0) == 0x90;
            found.items.push_back(std::move(key)); found.items.push_back(value(flat ? depth : depth + 1));
        }
        if (found.find("__ndarray__", Kind::bytes) != nullptr) return array(found);
        if (found.find("__npgeneric__", Kind::bytes) != nullptr) return scalar(found);
        for (const char* mark : {"nd", "__ndarray__", "__npgeneric__"})
            for (const Kind kind : {Kind::text, Kind::bytes})
                if (found.find(mark, kind) != nullptr && found.find("data", kind) != nullptr &&
                    found.find(mark[0] == 'n' ? "type" : "dtype", kind) != nullptr)
                    refuse("3", {"another numpy dialect, without bin keys"});
        return found;
    }
    // Check the keys that arrays and scalars have in common, and begin the value.
    static Value marked(Kind kind, const Value& found, const char* mark, size_t keys) {
        const Value *first = found.find(mark, Kind::bytes), *dtype = found.find("dtype", Kind::bytes);
        if (!first->is(Kind::boolean) || first->number == 0) refuse("3", {mark, " is not true"});
        if (found.items.size() != 2 * keys || found.find("data", Kind::bytes) == nullptr || dtype == nullptr)
            refuse("3", {mark, ": a key is missing, or too many"});
        if (!dtype->is(Kind::text) && !dtype->is(Kind::bytes)) refuse("3", {"a dtype is a str, not ", dtype->describe()});
        Value out = Value::of(kind); out.dtype = Dtype::parse(dtype->text);
        return out;
    }
    static Value array(const Value& found) {
        Value out = marked(Kind::array, found, "__ndarray__", 4);
        const Value *shape = found.find("shape", Kind::bytes), *data = found.find("data", Kind::bytes);
        if (shape == nullptr || !shape->is(Kind::list) || shape->items.size() > 32 || !data->is(Kind::bytes))
            refuse("3", {"an array has bin data and at most 32 extents"});
        uint64_t product = out.dtype.size;  // as if no extent were 0: numpy cannot hold more either way
        bool empty = false;
        for (const Value& extent : shape->items) {
            if (!extent.is(Kind::integer) || extent.number < 0) refuse("3", {"a shape that holds ", extent.describe()});
            const auto length = static_cast<uint64_t>(std::max<int64_t>(extent.number, 1));
            if (product > (uint64_t{1} << 62) / length) refuse("3", {"a shape that is too large"});
            product *= length, empty = empty || extent.number == 0; out.shape.push_back(extent.number);
        }
        if (data->text.size() != (empty ? 0 : product)) refuse("3", {out.describe(), " has ", data->text.size(), " bytes"});
        out.text = data->text;
        for (size_t i = 0; out.dtype.kind == 'b' && i < out.text.size(); ++i) out.text[i] = out.text[i] != 0;
        for (size_t at = 0; out.dtype.kind == 'U' && at < out.text.size(); at += 4)
            if (!is_unicode(load_bits(out.text.data() + at, {out.dtype.order, 'u', 4}))) refuse("3.4", {"no Unicode"});
        return out;
    }
    static Value scalar(const Value& found) {
        Value out = marked(Kind::scalar, found, "__npgeneric__", 3); const Value& data = *found.find("data", Kind::bytes);
        const char kind = out.dtype.kind; const int bits = static_cast<int>(8 * out.dtype.size);
        const double whole = static_cast<double>(data.number) + (data.is(Kind::natural) ? 18446744073709551616.0 : 0.0);
        const double value = data.is(Kind::real) ? data.real : whole; string points; bool good = data.is(Kind::boolean);
        if (kind == 'U') good = data.is(Kind::text) && read_utf8(data.text, &points) && points.size() <= out.dtype.size;
        else if (data.is(Kind::integer) || data.is(Kind::natural) || data.is(Kind::real)) {
            const double above = kind == 'b' ? 2.0 : std::ldexp(1.0, kind == 'u' ? bits : bits - 1);
            const double too_large = bits == 64 ? forever : bits == 32 ? 3.4028235677973366e38 : 65520.0;
            if (kind == 'f') good = !std::isfinite(value) || std::fabs(value) < too_large;
            else if (bits == 64 && !data.is(Kind::real)) good = kind == 'i' ? data.is(Kind::integer) : value >= 0;
            else good = value == std::trunc(value) && value < above && value >= (kind == 'i' ? -above : 0.0);
        }
        if (!good) refuse("3", {out.describe(), " of ", data.describe(), " that does not fit"});
        out.items.push_back(data);
        return out;
    }
};
// Decode one message. Throws ProtocolError, whatever the bytes are.
inline Value decode(string_view bytes) {
    Reader reader{bytes}; Value found = reader.value(0);
    if (reader.left() > 0) refuse("3", {reader.left(), " bytes behind the value"});
    return found;
}
// === 8 Frames (RFC 6455) =============================================================================================
enum class Op : uint8_t { continuation = 0, text = 1, binary = 2, close = 8, ping = 9, pong = 10 };
// A whole message, or a control frame; `payload` is valid until the reader is touched again.
struct Event { Op op = Op::binary; string_view payload; };
inline void write_frame(string& out, Op op, string_view payload, uint32_t key) {
    const uint64_t size = payload.size(), mask = uint64_t{key} << 32 | key;
    const unsigned wide = size < 126 ? 0 : size < 0x10000 ? 2 : 8;
    out += static_cast<char>(0x80U | static_cast<unsigned>(op));
    out += static_cast<char>(0x80U | (wide == 0 ? size : wide == 2 ? 126 : 127));
    for (unsigned i = wide; i > 0; --i) out += static_cast<char>(size >> (8 * (i - 1)) & 0xFF);
    char bytes[8]; std::memcpy(bytes, &mask, 8); out.append(bytes, 4);
    const size_t at = out.size(); out.append(payload);
    char* const masked = &out[at]; size_t i = 0;
    for (uint64_t word = 0; i + 8 <= size; i += 8) std::memcpy(&word, masked + i, 8), word ^= mask, std::memcpy(masked + i, &word, 8);
    for (; i < size; ++i) masked[i] = static_cast<char>(masked[i] ^ bytes[i % 8]);
}
// Cut received bytes into events: ask `room` where to put them, tell `filled`, then call `next` until it is false.
class FrameReader {
public:
    explicit FrameReader(size_t max_message_bytes) : max_(max_message_bytes) {}
    std::pair<char*, size_t> room() {
        if (begin_ > 0 && (begin_ == end_ || buffer_.size() - end_ < least)) {
            std::memmove(&buffer_[0], &buffer_[begin_], end_ - begin_); end_ -= begin_, begin_ = 0;
        }
        if (buffer_.size() - end_ < least) buffer_.resize(2 * std::max(buffer_.size(), least));
        return {&buffer_[end_], buffer_.size() - end_};
    }
    void filled(size_t count) { end_ += count; }
    [[gnu::always_inline]] bool full() const { return end_ - begin_ >= max_ && end_ - begin_ >= least; }  // a whole message is there
    // Take an HTTP header off the front, up to its empty line, or show what there is of it; false: more is needed.
    bool head(string& out) {
        out = buffer_.substr(0, end_); const size_t stop = out.find("\r\n\r\n");
        if (stop != string::npos) out.resize(stop + 2), begin_ = stop + 4;
        return stop != string::npos;
    }
    bool next(Event& event) {
        if (whole_) message_.clear(), whole_ = false;
        while (end_ - begin_ >= 2) {
            const char* head = &buffer_[begin_]; const unsigned first = static_cast<uint8_t>(head[0]);
            const auto op = static_cast<Op>(first & 15); const bool fin = first >= 0x80, control = op >= Op::close;
            uint64_t size = static_cast<uint8_t>(head[1]);
            if ((first & 0x70) != 0) refuse("1", {"reserved bits"});
            if (size >= 0x80) refuse("1", {"a masked frame from a server"});
            if (op > Op::pong || (op > Op::binary && !control)) refuse("1", {"a frame with the opcode ", first & 15});
            if (control && (!fin || size > 125)) refuse("1", {"a long or fragmented control frame"});
            const uint32_t wide = size < 126 ? 0 : size == 126 ? 2 : 8;
            if (end_ - begin_ < 2 + wide) return false;
            if (wide > 0) size = load_bits(head + 2, {'>', 'u', wide});
            if (!control && fragments_ != (op == Op::continuation))
                refuse("1", {fragments_ ? "a message inside another" : "a continuation of nothing"});
            if (!control && size > max_ - message_.size()) refuse("1", {"a message above ", max_, " bytes"}, 1009);
            if (end_ - begin_ - 2 - wide < size) return false;
            event = {op, string_view(head + 2 + wide, static_cast<size_t>(size))}; begin_ += 2 + wide + event.payload.size();
            if (control || (fin && !fragments_)) return true;
            if (!fragments_) op_ = op;
            message_.append(event.payload); fragments_ = !fin, whole_ = fin; event = {op_, message_};
            if (fin) return true;
        }
        return false;
    }
private:
    static constexpr size_t least = 1 << 16; size_t max_, begin_ = 0, end_ = 0;
    string buffer_, message_; Op op_ = Op::binary; bool fragments_ = false, whole_ = false;  // message_: put together of fragments
};
// === 9 Options =======================================================================================================
using Seed = std::optional<uint64_t>;
// The names and defaults are those of the Python client's options; 0 seconds stand for "no limit", or no pings.
struct Options {
    string url = "ws://127.0.0.1:8000";
    string api_key;                         // empty: none is sent [1.2]
    Seed seed;                              // env j's first reset gets seed + first_env + j
    std::optional<uint32_t> rank;           // place among the clients of a run
    std::optional<uint64_t> first_env;      // index of env 0 in the whole run; not set: rank * envs
    std::optional<uint32_t> group_num_envs; // envs of all clients that were started together; not set: our own
    bool reuse = true;                      // leave out observations that the server has [10.1]
    double connect_timeout = 300;           // seconds without a server after which to give up
    double ping_interval = 20, ping_timeout = 60, send_timeout = 60;  // send: what a server gets to take a message
    double max_backoff = 5;                 // longest wait between two tries
    size_t max_message_bytes = size_t{1} << 30; string client = "plugrl-cpp", version = client_version;
    std::function<void(bool warning, const string& text)> log;  // called in run's thread
};
struct Url {
    string host, port, path;
    // Take ws://host[:port][/path] apart; an IPv6 address stands in brackets.
    static Url parse(const string& text) {
        bool ascii = true;
        for (const char c : text) ascii = ascii && c > ' ' && c <= '~' && c != '@' && c != '#';
        if (text.compare(0, 6, "wss://") == 0) misuse({"url ", quote(text), ": there is no TLS here; put a proxy beside it"});
        if (!ascii || text.compare(0, 5, "ws://") != 0) misuse({"url must be like ws://host:port/path, not ", quote(text)});
        const size_t slash = std::min(text.find_first_of("/?", 5), text.size());
        Url url{text.substr(5, slash - 5), "80", text.substr(slash)};
        if (url.path.empty() || url.path[0] != '/') url.path.insert(0, 1, '/');
        const size_t bracket = url.host.find(']'), colon = url.host.find(':', bracket == string::npos ? 0 : bracket);
        if (colon != string::npos) url.port = url.host.substr(colon + 1), url.host.resize(colon);
        const long port = url.port.find_first_not_of("0123456789") == string::npos ? std::strtol(url.port.c_str(), nullptr, 10) : 0;
        if (port < 1 || port > 65535 || url.port.size() > 5) misuse({"url ", quote(text), ": a port is 1 to 65535"});
        if (url.host.empty() || (url.host[0] == '[') != (url.host.back() == ']')) misuse({"url ", quote(text), ": no host"});
        return url;
    }
};
// === 10 The connection: socket, handshake, ping and close ===========================================================
inline double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
inline double limit(double seconds) { return seconds > 0 ? seconds : forever; }
struct Stopped {};  // thrown where Client::stop was heard; it never leaves the client
// One WebSocket, driven by the thread that calls it. Waits are cut into slices, to hear a stop.
class Connection {
public:
    Connection(const Options& options, const std::atomic<bool>& stop)
        : options_(options), stop_(&stop), url_(Url::parse(options.url)), reader_(options.max_message_bytes) {}
    Connection(const Connection&) = delete;
    ~Connection() { hang_up(); }
    void open(double deadline) { dial(deadline), shake_hands(deadline), pinged_at_ = now_s(); }
    [[gnu::always_inline]] void queue(string_view message) { write_frame(out_, Op::binary, message, random_()); }
    // Send what is queued, in one go if the socket takes it. A lost connection shows at the next `receive`.
    void flush(double deadline = 0) {
        if (deadline == 0) deadline = now_s() + limit(options_.send_timeout);
        for (size_t sent = 0; sent < out_.size() && !ended_;) {
            const ssize_t count = ::send(fd_, &out_[sent], out_.size() - sent, MSG_NOSIGNAL);
            if (count < 0 && !later()) end("sending failed");
            if (count >= 0) sent += static_cast<size_t>(count);
            if (count >= 0 || ended_) continue;
            if (stopping()) deadline = std::min(deadline, now_s() + last_send_s);
            const int what = reader_.full() ? POLLOUT : POLLIN | POLLOUT;  // who writes first must not wait for us
            if (now_s() > deadline) end("it does not read");
            else if ((wait(what, slice_s) & POLLIN) != 0) read();
        }
        out_.clear();
    }
    // Wait for a message; pings are answered meanwhile. Throws ConnectionClosed, ProtocolError, Stopped.
    Event receive(double timeout_s = forever) {
        const double since = now_s(), interval_s = limit(options_.ping_interval), silence_s = interval_s + limit(options_.ping_timeout);
        for (Event event;;) {
            const bool found = reader_.next(event);
            if (found && !handle(event)) return event;
            if (!found && ended_) throw ConnectionClosed("the connection ended: " + how_, 1006);
            if (stopping()) throw Stopped{};
            if (!found) wait_for_bytes();
            const double now = now_s();
            if (now - pinged_at_ >= interval_s) pinged_at_ = now, write_frame(out_, Op::ping, "", random_()), flush();
            if (now - std::max(since, heard_at_) > silence_s) end("it was silent too long");
            if (now - since > timeout_s) end("no message in time");
        }
    }
    // Close with a code, and wait for the server to do the same, for at most two seconds.
    void close(int code, string_view reason) noexcept {
        try {
            const double deadline = now_s() + 2.0;
            stop_ = nullptr; send_close(code, reason), flush(deadline); ::shutdown(fd_, SHUT_WR);
            for (char unread[4096]; !ended_ && now_s() < deadline;) {
                wait(POLLIN, slice_s); const ssize_t count = ::recv(fd_, unread, sizeof unread, 0);
                ended_ = count == 0 || (count < 0 && !later());
            }
        } catch (...) {}  // no memory: the socket goes all the same
        hang_up();
    }
private:
    static constexpr double slice_s = 0.2;
    static constexpr double last_send_s = 0.5;  // what a message under way still gets after a stop
    static constexpr double look_s = 400e-6;    // longest look before sleeping
    [[gnu::always_inline]] static bool later() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }
    [[gnu::always_inline]] bool stopping() const { return stop_ != nullptr && stop_->load(); }
    void hang_up() { if (fd_ >= 0) ::close(fd_); fd_ = -1, ended_ = true; }
    void end(const char* how) {
        if (how_.empty()) how_ = how;
        const double until = now_s() + slice_s;
        while (!ended_ && !reader_.full() && now_s() < until && read()) {}  // what came before, such as a close frame
        ended_ = true;
    }
    bool read() {
        const auto [place, size] = reader_.room(); const ssize_t count = ::recv(fd_, place, size, 0);
        if (count > 0) reader_.filled(static_cast<size_t>(count)), heard_at_ = now_s();
        else if (count == 0 || !later()) {
            if (how_.empty()) how_ = count == 0 ? "no close frame came" : std::strerror(errno);
            ended_ = true;
        }
        return count > 0;
    }
    int wait(int what, double seconds) const {
        pollfd one{fd_, static_cast<short>(what), 0};
        return ::poll(&one, 1, static_cast<int>(std::max(0.0, seconds) * 1000) + 1) > 0 ? one.revents : 0;
    }
    // Where waits are short, look for the bytes before sleeping for them: to be woken takes longer than such a wait.
    void wait_for_bytes() {
        const double began = now_s(), patience_s = expected_s_ > look_s ? 0 : std::min(look_s, 1.5 * expected_s_ + look_s / 8);
        bool found = read();
        for (; !found && !ended_ && now_s() - began < patience_s; found = read()) ::sched_yield();
        if (!found && !ended_) wait(POLLIN, slice_s), read();
        expected_s_ += 0.25 * (std::min(now_s() - began, 4 * look_s) - expected_s_);
    }
    bool handle(const Event& event) {
        if (event.op == Op::ping && !ended_) write_frame(out_, Op::pong, event.payload, random_()), flush();
        if (event.op != Op::close) return event.op >= Op::ping;
        const size_t size = event.payload.size(); const string reason(event.payload.substr(std::min<size_t>(2, size)));
        const int code = size == 0 ? 1005 : size == 1 ? 0 : static_cast<int>(load_bits(event.payload.data(), {'>', 'u', 2}));
        const bool unused = code < 1000 || code > 4999 || (code > 1014 && code < 3000) || code == 1004 || code == 1006;
        if (unused || (code == 1005 && size > 0)) refuse("7", {"a close frame with the code ", code});
        if (!read_utf8(reason, nullptr)) refuse("7", {"a close reason that is no UTF-8"}, 1007);
        send_close(size == 0 ? 1000 : code, "");
        throw ConnectionClosed(cat({"the server closed with ", code, " ", quote(reason)}), code, reason);
    }
    void send_close(int code, string_view reason) {
        string payload = {static_cast<char>(code >> 8), static_cast<char>(code & 255)};
        for (const char c : reason.substr(0, 120)) payload += c >= ' ' && c <= '~' ? c : '?';
        if (!close_sent_) write_frame(out_, Op::close, payload, random_());
        close_sent_ = true;
    }
    [[noreturn]] void fail(Pieces why, int status = 0) const {
        throw HandshakeError(cat({"cannot reach ", options_.url, ": ", cat(why)}), status);
    }
    void dial(double deadline) {
        const string host = url_.host[0] == '[' ? url_.host.substr(1, url_.host.size() - 2) : url_.host;
        addrinfo hints{}, *list = nullptr; hints.ai_socktype = SOCK_STREAM;
        int status = ::getaddrinfo(host.c_str(), url_.port.c_str(), &hints, &list);
        if (status != 0) fail({::gai_strerror(status), "; check the host name"});
        const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, ::freeaddrinfo);
        for (const addrinfo* one = list; one != nullptr && ended_; one = one->ai_next) {
            hang_up(); fd_ = ::socket(one->ai_family, one->ai_socktype, one->ai_protocol);
            if (fd_ < 0) { status = errno; continue; }
            set_options();
            status = ::connect(fd_, one->ai_addr, one->ai_addrlen) == 0 ? 0 : errno;
            for (socklen_t size = sizeof status; status == EINPROGRESS || status == EINTR;) {
                if (stopping()) throw Stopped{};
                if (now_s() > deadline) status = ETIMEDOUT;
                else if (wait(POLLOUT, std::min(slice_s, deadline - now_s())) != 0) ::getsockopt(fd_, SOL_SOCKET, SO_ERROR, &status, &size);
            }
            ended_ = status != 0;
        }
        if (ended_) fail({std::strerror(status), "; is a training server running there?"});
    }
    void set_option(int level, int option, int value) const { ::setsockopt(fd_, level, option, &value, sizeof value); }
    void set_options() const {  // those that the system does not have are passed over
        ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL, 0) | O_NONBLOCK), ::fcntl(fd_, F_SETFD, FD_CLOEXEC);
        set_option(IPPROTO_TCP, TCP_NODELAY, 1);  // a small message behind another one waits 40 ms otherwise
        set_option(SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef SO_NOSIGPIPE
        set_option(SOL_SOCKET, SO_NOSIGPIPE, 1);
#endif
    }
    void shake_hands(double deadline) {
        string nonce, head;
        while (nonce.size() < 16) nonce += static_cast<char>(random_() & 0xFF);
        out_ = cat({"GET ", url_.path, " HTTP/1.1\r\nHost: ", url_.host, ":", url_.port, "\r\nUpgrade: websocket\r\n",
                    "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: ", base64(nonce),
                    options_.api_key.empty() ? "" : "\r\nAuthorization: Api-Key ", options_.api_key, "\r\n\r\n"});
        for (flush(deadline); !reader_.head(head); read()) {
            if (stopping()) throw Stopped{};
            if (ended_) fail({"it ended during the handshake: ", how_});
            if (head.size() > 1 << 16) fail({"its header has no end"});
            if (now_s() > deadline) fail({"the handshake took too long"});
            wait(POLLIN, std::min(slice_s, deadline - now_s()));
        }
        const string shown = quote(head);
        const bool http = head.size() > 12 && head.compare(0, 7, "HTTP/1.") == 0;
        const int status = http ? static_cast<int>(std::clamp(std::strtol(head.c_str() + 9, nullptr, 10), 0L, 1000L)) : 0;
        if (status == 401) fail({"HTTP status 401: it wants its api_key"}, status);
        if (status != 101) fail({"HTTP status ", status, ": it answers ", shown, "; is it a training server?"}, status);
        string tight, small;  // without spaces; in small letters too
        for (const char c : head) if (c != ' ' && c != '\t') tight += c, small += c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
        const auto at = [&small](const char* text, size_t from = 0) { return small.find(text, from); };
        const size_t key = at("\r\nsec-websocket-accept:"); bool upgrade = false;
        for (size_t line = at("\r\nconnection:"); line != string::npos; line = at("\r\nconnection:", line + 2))
            upgrade = upgrade || at("upgrade", line) < at("\r\n", line + 2);
        if (key == string::npos || tight.compare(key + 23, 30, accept_of(base64(nonce)) + "\r\n") != 0 || !upgrade ||
            at("\r\nupgrade:websocket\r\n") == string::npos || at("\r\nsec-websocket-extensions:") != string::npos)
            fail({"it is no WebSocket server, it answers ", shown});
    }
    const Options& options_; const std::atomic<bool>* stop_; Url url_; FrameReader reader_;
    string out_, how_; std::random_device random_; double heard_at_ = 0, pinged_at_ = 0, expected_s_ = look_s;
    int fd_ = -1; bool ended_ = true, close_sent_ = false;
};
// === 11 Environments: what authors write ============================================================================
struct Space {  // of Gymnasium; make one with the functions below
    const char* type = "Box"; Dtype dtype;
    Shape shape;                   // of one env's value; empty for discrete and text
    std::vector<int64_t> numbers;  // discrete: n and start; multi_discrete: n of each; text: the longest length
    string low, high;              // box: bounds as bytes of the dtype, of one element or of all; text: the charset
    size_t count() const {
        size_t product = 1;
        for (const int64_t extent : shape) product *= static_cast<size_t>(extent);
        return product;
    }
    size_t bytes() const { return is_text() ? 0 : count() * dtype.size; }  // of one env's value in its row
    size_t words() const { return dtype.kind == 'f' ? count() : is_text() ? static_cast<size_t>(numbers[0]) : (bytes() + 3) / 4; }
    bool is_box() const { return !high.empty(); }
    [[gnu::always_inline]] bool is_text() const { return dtype.kind == 'U'; }
    bool is_image() const { return is_box() && dtype == Dtype::of<uint8_t>() && shape.size() == 3 && shape[2] <= 4; }
};
// Box of T (float, double, an int type); a bound of one element stands for all.
template <class T> Space box(const Shape& shape, std::initializer_list<T> low, std::initializer_list<T> high) {
    static_assert(!std::is_same_v<T, bool>, "flags are a multi_binary space");
    Space space{"Box", Dtype::of<T>(), shape, {}, {}, {}};
    space.low.assign(reinterpret_cast<const char*>(low.begin()), low.size() * sizeof(T));
    space.high.assign(reinterpret_cast<const char*>(high.begin()), high.size() * sizeof(T));
    for (const size_t given : {low.size(), high.size()})
        if (given != 1 && given != space.count()) misuse({"box: a bound has one element, or all"});
    return space;
}
template <class T> Space box(const Shape& shape, T low, T high) { return box<T>(shape, {low}, {high}); }
inline Space image(int64_t height, int64_t width, int64_t channels) { return box<uint8_t>({height, width, channels}, 0, 255); }
inline Space discrete(int64_t n, int64_t start = 0) { return {"Discrete", Dtype::of<int64_t>(), {}, {n, start}, {}, {}}; }
inline Space multi_discrete(const Shape& n) { return {"MultiDiscrete", Dtype::of<int64_t>(), {static_cast<int64_t>(n.size())}, n, {}, {}}; }
inline Space multi_binary(int64_t n) { return {"MultiBinary", Dtype::of<std::int8_t>(), {n}, {}, {}, {}}; }
inline Space text(int64_t max_length, const string& charset) { return {"Text", {Dtype::native(), 'U', 4}, {}, {max_length}, charset, {}}; }
// An entry of the observation. A lone entry without a name is an observation that is no dict; it travels as "obs".
struct Entry {
    string name; Space space; size_t offset = 0, word = 0;  // filled in by the client: where it stands in a row, in a digest
};
struct Spec {  // what an env is; all envs of a client have the same
    std::vector<Entry> observation; Space action;
    string env_id;                  // empty: not told
    int64_t max_episode_steps = 0;  // 0: not told
};
// One env's place in a batch: its observation, its running episode, its last chunk, and what the server asks of it.
struct Row {
    int64_t index = 0, chunks = 0, length = 0; double ret = 0, reward = 0; float narrow = 0;  // narrow: the reward
    bool terminated = false, truncated = false, ended = false, success = false;
    bool known = false, resetting = false;  // its last feedback may stand for its next observation [10.1]; it is to be reset
    Seed seed; const Value* options = nullptr;  // for that reset
    string data;                       // its entries one after another, each at a multiple of 8 bytes
    string text; uint64_t chain = 0;   // UTF-32 of this machine; the digests of its steps, chained [step-digest]
};

class Observation {  // where one env writes; entries are counted in the order of the spec
public:
    Observation(const Spec& spec, Row& row) : spec_(spec), row_(row) {}
    // Give the place of an entry's elements, in C order: T is the type of its space. Good for drawing images into.
    template <class T> T* at(size_t entry) { return static_cast<T*>(place(entry, Dtype::of<T>(), any)); }
    template <class T> void set(size_t entry, const T* values, size_t count) {
        if (void* const to = place(entry, Dtype::of<T>(), count); count > 0) std::memcpy(to, values, count * sizeof(T));
    }
    template <class T> void set(size_t entry, std::initializer_list<T> values) { set(entry, values.begin(), values.size()); }
    template <class T> void set(size_t entry, const std::vector<T>& values) { set(entry, values.data(), values.size()); }
    void set_text(size_t entry, string_view utf8) {
        string points; place(entry, {Dtype::native(), 'U', 4}, any);
        if (!read_utf8(utf8, &points) || points.size() / 4 > static_cast<size_t>(spec_.observation[entry].space.numbers[0]))
            misuse({"entry ", entry, ": ", quote(utf8), " is no UTF-8, or too long"});
        row_.text = points;
    }
private:
    static constexpr size_t any = static_cast<size_t>(-1);  // a count that is not given
    void* place(size_t entry, const Dtype& dtype, size_t count) const {
        if (entry >= spec_.observation.size()) misuse({"the observation has no entry ", entry});
        const Entry& one = spec_.observation[entry];
        if (!(one.space.dtype == dtype) || (count != any && count != one.space.count()))
            misuse({"entry ", entry, " has ", one.space.count(), " of ", one.space.dtype.str(), ", got ",
                    count == any ? one.space.count() : count, " of ", dtype.str()});
        return row_.data.data() + one.offset;
    }
    const Spec& spec_; Row& row_;
};
// One env's action of one step: as many elements as the action space has, in the dtype that the trainer sends.
struct Action {
    const char* data; Dtype dtype; size_t size;
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
struct Step {  // what a step brought, beside the observation
    double reward = 0;
    bool terminated = false, truncated = false;  // an end of the task itself; a limit of time
    bool success = false;                        // read where the episode ended
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
// The sum of a row of 32-bit words, each times the key of its place: what an env took and gave in one step, or at a reset.
struct Digest {
    uint64_t sum = 0, words = 0;
    void word(uint64_t value) {
        uint64_t key = ++words * 0x9E3779B97F4A7C15;  // SplitMix64 from state 0
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9, key = (key ^ key >> 27) * 0x94D049BB133111EB;
        sum += ((key ^ key >> 31) | 1) * (value & 0xFFFFFFFF);
    }
    void real(double wide) { const auto narrow = static_cast<float>(wide); uint32_t bits = 0; std::memcpy(&bits, &narrow, 4), word(bits); }
    // Add the values of an entry of a space: floats as float32, all others as their bytes in the dtype of the space.
    void add(const Dtype& space, string_view data, const Dtype& dtype) {
        for (size_t at = 0; space.kind == 'f' && at < data.size(); at += dtype.size) real(load_real(&data[at], dtype));
        const bool same = dtype == space && space.order != '>'; uint64_t bytes = 0; uint32_t bits = 0; int64_t whole = 0;
        for (size_t at = 0; space.kind != 'f' && at < data.size(); at += same ? 4 : dtype.size) {
            const auto width = same ? static_cast<uint32_t>(std::min<size_t>(4, data.size() - at)) : space.size;
            if (same) whole = static_cast<int64_t>(load_bits(&data[at], {'<', 'u', width}));
            else if (dtype.kind == 'f') whole = static_cast<int64_t>(load_real(&data[at], dtype));
            else load_integer(&data[at], dtype, whole);
            bytes |= (static_cast<uint64_t>(whole) & ~0ULL >> (64 - 8 * width)) << bits;
            for (bits += 8 * width; bits >= 32; bits -= 32) word(bytes), bytes >>= 32;
        }
        if (bits > 0) word(bytes);
    }
};
// === 13 The batch of envs: those of a connection ====================================================================
class Batch {
public:
    explicit Batch(Envs envs) : rows(envs.size()), envs_(std::move(envs)) {
        string first;
        for (size_t i = 0; i < rows.size(); ++i) {
            if (envs_[i] == nullptr) misuse({"env ", i, " is null"});
            string described; spec = envs_[i]->spec(); write_spec(described, 0);
            if (i > 0 && described != first) misuse({"the envs have one spec, but env ", i, " has another than env 0"});
            size_t size = 32;  // more than a string keeps inside of itself, where nothing need be aligned
            for (Entry& one : spec.observation) {
                one.offset = size, size += (one.space.bytes() + 7) / 8 * 8;
                for (const Entry& other : spec.observation) one.word += other.name < one.name ? other.space.words() : 0;
            }
            first = described, rows[i].index = static_cast<int64_t>(i), rows[i].data.resize(size), all.push_back(i);
        }
        if (rows.empty()) misuse({"a client has one env at least"});
    }
    Spec spec; std::vector<Row> rows;
    Rows all;  // 0 … n-1
    int64_t steps = 0; bool digests = false;  // whether the server wants those of the steps
    void reset(Row& row, const Seed& seed, const Value* options = nullptr) {
        drive(row, nullptr, seed, options); row.chunks = row.length = 0, row.ret = 0;
    }
    // Run one chunk [H, n, *da] for some envs, step by step; an env's part of it ends with its episode.
    void step(const Value& action, const Rows& who) {
        const size_t n = rows.size(), width = spec.action.count(), horizon = static_cast<size_t>(action.shape[0]);
        if (action.count() / (n * width) != horizon || action.count() % (n * width) != 0)  // a product could wrap
            refuse("5.3", {action.describe(), ": one action has ", width, " elements"});
        int64_t whole = 0;
        for (size_t i = 0; spec.action.dtype.kind != 'f' && i < action.count(); ++i)
            if (!load_integer(action.at(i), action.dtype, whole)) refuse("5.3", {"action: no 64-bit integer"});
        for (const size_t i : who) rows[i].ended = false, rows[i].reward = -0.0, ++rows[i].chunks;  // -0 + x is x, 0 + -0 is not
        for (size_t k = 0; k < horizon; ++k)
            for (const size_t i : who) {
                if (rows[i].ended) continue;
                const Action one{action.at((k * n + i) * width), action.dtype, width};
                drive(rows[i], &one, {}, nullptr); ++rows[i].length, ++steps;
            }
        for (const size_t i : who) rows[i].ret += rows[i].reward, rows[i].narrow = static_cast<float>(rows[i].reward);
    }
    template <class T> [[gnu::always_inline]] void column(Writer& out, const char* name, const Rows& who, T Row::*member) const {
        column(out, name, who, reinterpret_cast<const char*>(&(rows[0].*member)), Dtype::of<T>());
    }
    void column(Writer& out, const char* name, const Rows& who, const char* first, const Dtype& dtype) const {
        out.str(name).open_array(who.size() * dtype.size);
        for (const size_t i : who) out.raw(first + i * sizeof(Row), dtype.size);
        out.close_array(dtype, {static_cast<int64_t>(who.size())});
    }
    void observation(Writer& out, const Rows& who) const {
        Shape shape(1, static_cast<int64_t>(who.size())); out.map(3);
        for (const bool images : {true, false}) {
            size_t count = 0;
            for (const Entry& one : spec.observation) count += !one.space.is_text() && one.space.is_image() == images;
            out.str(images ? "images" : "states").map(count);
            for (const Entry& one : spec.observation) {
                if (one.space.is_text() || one.space.is_image() != images) continue;
                out.str(one.name.empty() ? "obs" : one.name).open_array(who.size() * one.space.bytes());
                for (const size_t i : who) out.raw(rows[i].data.data() + one.offset, one.space.bytes());
                shape.resize(1), shape.insert(shape.end(), one.space.shape.begin(), one.space.shape.end());
                out.close_array(one.space.dtype, shape);
            }
        }
        size_t width = 4;
        for (const size_t i : who) width = std::max(width, rows[i].text.size());
        out.str("text").open_array(who.size() * width);
        for (const size_t i : who) out.raw((rows[i].text + string(width - rows[i].text.size(), '\0')).data(), width);
        out.close_array({Dtype::native(), 'U', static_cast<uint32_t>(width)}, {static_cast<int64_t>(who.size())});
    }
    // Write the env-spec map as far as the envs know it; `others` is how many keys will follow.
    void write_spec(string& bytes, unsigned others) const {
        const std::vector<Entry>& entries = spec.observation; const bool bare = entries.size() == 1 && entries[0].name.empty();
        bool good = !entries.empty() && !spec.action.is_text(), sound = usable(spec.action) && spec.action.count() > 0;
        for (const Entry& one : entries) {
            sound = sound && usable(one.space);
            for (const Entry& other : entries)
                good = good && (bare || !one.name.empty()) && (&one == &other || one.name != other.name) &&
                       (&one == &other || !one.space.is_text() || !other.space.is_text());
        }
        if (!good) misuse({"a spec has entries of different names, at most one text, none for action"});
        if (!sound) misuse({"a space has no bounds or length, no action, or an extent below 0 or of 256 MiB"});
        Writer out(bytes);
        out.map(2U + others + !spec.env_id.empty() + (spec.max_episode_steps > 0)), out.str("observation_space");
        if (!bare) out.map(2), out.str("type").str("Dict").str("spaces").map(entries.size());
        for (const Entry& one : entries) write_space(bare ? out : out.str(one.name), one.space);
        write_space(out.str("action_space"), spec.action);
        if (!spec.env_id.empty()) out.str("env_id").str(spec.env_id);
        if (spec.max_episode_steps > 0) out.str("max_episode_steps").integer(spec.max_episode_steps);
    }
private:
    static bool usable(const Space& space) {
        const bool is_box = string_view(space.type) == "Box"; uint64_t size = space.dtype.size; bool good = true;
        for (const int64_t extent : space.shape) {
            const auto length = static_cast<uint64_t>(std::max<int64_t>(extent, 1));
            good = good && extent >= 0 && size <= (uint64_t{1} << 28) / length, size *= length;
        }
        for (const string* bound : {&space.low, &space.high})
            good = good && (!is_box || (!bound->empty() && (bound->size() == space.dtype.size || bound->size() == space.bytes())));
        return good && (!space.is_text() || (!space.numbers.empty() && space.numbers[0] >= 0));
    }
    static void write_space(Writer& out, const Space& space) {
        const bool discrete = space.numbers.size() == 2 && space.shape.empty();
        out.map(space.is_box() ? 5 : space.is_text() ? 4 : discrete ? 3 : 2), out.str("type").str(space.type);
        if (space.is_text()) {
            out.str("min_length").integer(0), out.str("max_length").integer(space.numbers[0]), out.str("charset").str(space.low);
        } else if (discrete) {
            out.str("n").integer(space.numbers[0]), out.str("start").integer(space.numbers[1]);
        } else if (!space.numbers.empty()) {
            out.str("nvec").open_array(space.numbers.size() * 8), out.raw(space.numbers.data(), space.numbers.size() * 8);
            out.close_array(space.dtype, space.shape);
        } else {
            out.str("shape").list(space.shape.size());
            for (const int64_t extent : space.shape) out.integer(extent);
        }
        if (!space.is_box()) return;
        out.str("dtype").str(space.dtype.str());
        for (const string* bound : {&space.low, &space.high}) {
            out.str(bound == &space.low ? "low" : "high").open_array(bound->size()), out.raw(bound->data(), bound->size());
            out.close_array(space.dtype, bound->size() == space.dtype.size ? Shape(1, 1) : space.shape);
        }
    }
    void drive(Row& row, const Action* action, const Seed& seed, const Value* options) {
        Env& env = *envs_[static_cast<size_t>(row.index)]; Observation observation(spec, row);
        const auto failed = [&](const char* why) {
            const char* call = action != nullptr ? ") failed in step(): " : ") failed in reset(): ";
            std::throw_with_nested(EnvFailed(cat({"env ", row.index, " (", spec.env_id, call, why})));
        };
        try {
            if (options != nullptr) env.options(*options);
            if (action == nullptr) return env.reset(seed, observation), digest(row, nullptr, 0);
            const Step done = env.step(*action, observation);
            row.reward += done.reward, row.terminated = done.terminated, row.truncated = done.truncated;
            row.ended = done.terminated || done.truncated, row.success = row.ended && done.success;
            if (digests) digest(row, action, done.reward);
        } catch (const std::exception& error) { failed(error.what()); } catch (...) { failed("no std::exception"); }
    }
    void digest(Row& row, const Action* action, double reward) const {
        Digest sum;
        sum.word(action == nullptr ? 4U : row.terminated + 2U * row.truncated), sum.real(reward);
        if (action != nullptr) sum.add(spec.action.dtype, {action->data, action->size * action->dtype.size}, action->dtype);
        for (const Entry& one : spec.observation) {
            const string_view plain(&row.data[one.offset], one.space.bytes()); sum.words = 2 + spec.action.words() + one.word;
            sum.add(one.space.dtype, one.space.is_text() ? string_view(row.text) : plain, one.space.dtype);
        }
        row.chain = sum.sum + (action == nullptr ? 0 : row.chain * 0xD1342543DE82EF95);
    }
    Envs envs_;
};
// === 14 The session: who may say what when [4] ======================================================================
// One connection's state: bytes of the server in, messages for it out. There is no socket in here.
class Session {
public:
    enum class State : uint8_t { metadata, infer, action, feedback };  // what is due
    explicit Session(Batch& batch) : batch_(batch) { for (Row& row : batch_.rows) row.known = row.resetting = false; }
    State state() const { return state_; }
    const Value* metadata(string_view key) const {  // the value of a key of its `data`; null if it is not known
        const Value* data = metadata_.find("data"); return data != nullptr ? data->find(key) : nullptr;
    }
    [[gnu::always_inline]] const Value& action() const { return *action_; }     // [H, n, *da]; whom to reset instead stands in the rows
    bool offers(string_view feature) const {
        const Value* features = metadata("features");
        for (size_t i = 0; features != nullptr && features->is(Kind::list) && i < features->items.size(); ++i)
            if (features->items[i].is(Kind::text) && features->items[i].text == feature) return true;
        return false;
    }
    // Take in one message of the server: metadata first, then an action for each infer.
    void receive(string_view bytes) {
        Value message = decode(bytes); const Value *type = message.find("message_type"), *data = message.find("data");
        const string name = type != nullptr && type->is(Kind::text) ? type->text : "nothing";
        if (name != "metadata" && name != "action" && name != "infer" && name != "feedback")
            refuse("2", {message.describe(), ", message_type ", quote(name), ", expected metadata or action"});
        const char* due = state_ == State::metadata ? "metadata" : state_ == State::action ? "action" : "nothing";
        if (name != due) refuse("4.2", {name, " came, ", due, " was due"});
        const bool first = state_ == State::metadata;
        if (first && data != nullptr && !data->is(Kind::map)) refuse("5.1", {"metadata: data is a map, not ", data->describe()});
        (first ? metadata_ : message_) = std::move(message);
        if (!first) read_action();
        state_ = first ? State::infer : State::feedback;
        if (first) batch_.digests = offers("step-digest") && offers("env-spec");  // we announce it in our env_spec
    }
    // Write an infer for all envs [5.2]; with `reuse` it leaves out what the server has [10.1]. `env_spec` may be empty.
    void infer(string& bytes, bool reuse, const string& env_spec) {
        if (state_ != State::infer) misuse({"an infer is not due"});
        const Rows& all = batch_.all; Rows unknown;
        for (const size_t i : all) if (!batch_.rows[i].known) unknown.push_back(i);
        reuse = reuse && unknown.size() < all.size() && offers("reuse-feedback-obs");
        Writer out(bytes); out.map(4U + reuse + !env_spec.empty() + batch_.digests);
        out.str("message_type").str("infer").str("data"), batch_.observation(out, reuse ? unknown : all);
        batch_.column(out, "env_indices", all, &Row::index), batch_.column(out, "step_ids", all, &Row::chunks);
        if (reuse) batch_.column(out, "reuse", all, &Row::known);
        if (!env_spec.empty()) out.str("env_spec").raw(env_spec.data(), env_spec.size());
        if (batch_.digests) batch_.column(out, "digest", all, &Row::chain);
        state_ = State::action;
    }
    // Write the feedback of the envs that were stepped [5.4].
    void feedback(string& bytes, const Rows& who) {
        if (state_ != State::feedback) misuse({"a feedback is not due"});
        Writer out(bytes); out.map(4U + batch_.digests), out.str("message_type").str("feedback");
        batch_.column(out, "env_indices", who, &Row::index), batch_.column(out, "step_ids", who, &Row::chunks);
        if (batch_.digests) batch_.column(out, "digest", who, &Row::chain);
        out.str("data").map(5), out.str("obs"), batch_.observation(out, who);
        if (offers("env-spec")) batch_.column(out, "rewards", who, &Row::reward);
        else batch_.column(out, "rewards", who, &Row::narrow);  // float32 is the custom
        batch_.column(out, "terminated", who, &Row::terminated), batch_.column(out, "truncated", who, &Row::truncated);
        bool any = false;
        for (const size_t i : who) any = any || batch_.rows[i].ended, batch_.rows[i].known = !batch_.rows[i].ended;
        out.str("info").map(any ? 1 : 0);
        if (any) {
            out.str("episode").map(4);
            batch_.column(out, "r", who, &Row::ret), batch_.column(out, "l", who, &Row::length);
            batch_.column(out, "s", who, &Row::success), batch_.column(out, "mask", who, &Row::ended);
        }
        state_ = State::infer;
    }
private:
    Rows names(const Value* value, const char* clause) const {
        if (value == nullptr || !value->is(Kind::array) || value->shape.size() != 1 || !value->dtype.is_int())
            refuse(clause, {"action: env_ids is a 1-d int array, not ", value != nullptr ? value->describe() : "none"});
        Rows found; string seen(batch_.rows.size(), '\0');
        for (size_t i = 0; i < value->count(); ++i) {
            int64_t name = -1;
            const bool ours = load_integer(value->at(i), value->dtype, name) && name >= 0 && name < static_cast<int64_t>(seen.size());
            if (!ours || seen[static_cast<size_t>(name)]++ != 0) refuse(clause, {"action: env_ids has a stranger, or one twice"});
            found.push_back(static_cast<size_t>(name));
        }
        return found;
    }
    void read_action() {
        const Value *data = message_.find("data"), *horizon = metadata("action_horizon"), *reset = message_.find("reset");
        const auto n = static_cast<int64_t>(batch_.rows.size());
        action_ = data != nullptr ? data->find("action") : nullptr;
        if (action_ == nullptr || !action_->is(Kind::array) || action_->dtype.kind == 'U' || action_->shape.size() < 2 ||
            action_->shape[0] < 1 || action_->shape[1] != n)
            refuse("5.3", {"action: data.action must be a numeric array [H, ", n, ", *da] with H of at least 1, got ",
                           action_ != nullptr ? action_->describe() : "none"});
        if (const Value* ids = data->find("env_ids"); ids != nullptr && names(ids, "5.3") != batch_.all)
            refuse("5.3", {"action: env_ids are not those of the infer"});
        if (horizon != nullptr && horizon->is(Kind::integer) && action_->shape[0] > horizon->number)
            refuse("5.1", {"action: ", action_->shape[0], " steps, but the horizon is ", horizon->number});
        for (Row& row : batch_.rows) row.resetting = false, row.seed.reset(), row.options = nullptr;
        if (reset != nullptr && !reset->is(Kind::nil)) read_resets(*reset);
    }
    void read_resets(const Value& reset) {
        const char* clause = "seeded-reset";
        if (!offers(clause)) refuse(clause, {"action: a reset, which was not offered"});
        const Rows who = names(reset.find("env_ids"), clause);
        const auto item = [&](const char* key, size_t at) -> Value {  // of a list, or of an int array
            const Value* all = reset.find(key); int64_t number = 0;
            if (all == nullptr) return {};
            if (all->is(Kind::list) && all->items.size() == who.size()) return all->items[at];
            if (!all->is(Kind::array) || !all->dtype.is_int() || all->shape.size() != 1 || all->count() != who.size())
                refuse(clause, {"action: reset.", key, " must be a list of one item per env, got ", all->describe()});
            return Value::of(load_integer(all->at(at), all->dtype, number) ? Kind::integer : Kind::natural, number);
        };
        for (size_t at = 0; at < who.size(); ++at) {
            Row& row = batch_.rows[who[at]]; row.resetting = true, row.known = false;
            const Value seed = item("seed", at), options = item("options", at);
            if (seed.is(Kind::natural) || (seed.is(Kind::integer) && seed.number >= 0)) row.seed = static_cast<uint64_t>(seed.number);
            if (!row.seed && !seed.is(Kind::nil)) refuse(clause, {"action: a seed is 0 or more, or nil, not ", seed.describe()});
            if (!options.is(Kind::map) && !options.is(Kind::nil)) refuse(clause, {"action: options are maps, not ", options.describe()});
            if (options.is(Kind::map)) row.options = &reset.find("options")->items[at];
        }
    }
    Batch& batch_; State state_ = State::metadata; Value metadata_, message_; const Value* action_ = nullptr;
};
// === 15 The client ===================================================================================================
struct Summary {
    int64_t episodes = 0, steps = 0, reconnects = 0; double total_return = 0;  // of all finished episodes
    std::vector<double> returns;  // of the last finished ones, 1000 at most, oldest first
    bool stopped = false;         // by Client::stop; otherwise the server said that the run is over [7.1]
};

class Client {
public:
    Client(Options options, Envs envs) : options_(std::move(options)), batch_(std::move(envs)) {
        Url::parse(options_.url); const Options& all = options_;
        for (const double seconds : {all.connect_timeout, all.ping_interval, all.ping_timeout, all.send_timeout, all.max_backoff})
            if (!(seconds >= 0 && seconds < 1e9)) misuse({"timeouts are seconds, 0 or more"});
        for (const char c : options_.api_key) if (c <= ' ' || c > '~') misuse({"api_key is printable ASCII without spaces"});
        batch_.write_spec(env_spec_, 5U + options_.rank.has_value());
        Writer out(env_spec_); out.str("num_envs").natural(batch_.all.size());
        out.str("group_num_envs").natural(options_.group_num_envs ? *options_.group_num_envs : batch_.all.size());
        out.str("features").list(4), out.str("reuse-feedback-obs").str("env-spec").str("seeded-reset").str("step-digest");
        out.str("client").str(options_.client).str("client_version").str(options_.version);
        if (options_.rank) out.str("rank").natural(*options_.rank);
    }
    // End `run` soon, with close code 1000 [7.5]: from any thread, or from a signal handler. A chunk is waited for.
    void stop() noexcept { stop_.store(true); }
    const Summary& summary() const { return summary_; }
    // Serve until the server says that the run is over, or `stop` is called. A lost connection is made again [7.6].
    // Throws EnvFailed, ConnectTimeout; HandshakeError for 401 and 403; ProtocolError for a text frame [7.4].
    const Summary& run() {
        const uint64_t first = options_.first_env.value_or(uint64_t{options_.rank.value_or(0)} * batch_.all.size());
        for (Row& row : batch_.rows)
            batch_.reset(row, options_.seed ? Seed(*options_.seed + first + static_cast<uint64_t>(row.index)) : Seed());
        try { for (string error; attempt(error);) pause(error); }
        catch (const Stopped&) { summary_.stopped = true; }
        return summary_;
    }
private:
    void log(bool warning, const string& text) const { if (options_.log) options_.log(warning, text); }
    double remaining_s() const { return std::max(0.0, limit(options_.connect_timeout) - without_server_s_); }
    // Connect once, serve for as long as it lasts, close as its end demands; true: come back, because of `error`.
    bool attempt(string& error) {
        if (stop_.load()) throw Stopped{};
        const double began = now_s(); connected_at_ = 0; bool over = false;
        Connection connection(options_, stop_);
        try {
            connection.open(began + std::max(1.0, std::min(10.0, remaining_s()))); exchange(connection);
        } catch (const HandshakeError& refused) {
            if (refused.code == 401 || refused.code == 403) throw;
            error = refused.what();
        } catch (const ConnectionClosed& closed) {
            connection.close(1000, "");
            if (stop_.load()) throw Stopped{};
            error = cat({options_.url, ": ", closed.what()}); over = closed.code == 1001 && closed.detail == "plugrl-server-stop";
        } catch (const ProtocolError& broken) {
            connection.close(broken.code, broken.what());
            if (broken.detail == "7.4") throw;
            error = cat({options_.url, " broke a rule: ", broken.what()});
        } catch (const Stopped&) { connection.close(1000, ""); throw; }
        catch (...) { connection.close(1011, "env failed"); throw; }
        if (connected_at_ == 0) without_server_s_ += now_s() - began;
        else if (now_s() - connected_at_ >= std::max(5.0, options_.max_backoff)) tries_ = 0, without_server_s_ = 0;
        summary_.reconnects += !over && connected_at_ != 0;
        if (over) log(batch_.steps == 0, batch_.steps == 0 ? "the run is over so soon: see the server's log" : "the run is over");
        return !over;
    }
    // Metadata, then infer, action, feedback for as long as the connection lasts: it returns only by throwing.
    [[noreturn]] void exchange(Connection& connection) {
        Session session(batch_); string out;
        const auto receive = [&](double timeout_s) {
            const Event event = connection.receive(timeout_s);
            if (event.op == Op::text) refuse("7.4", {options_.url, " sent a text frame: no training server"}, 1003);
            session.receive(event.payload);
        };
        receive(std::min(30.0, remaining_s())); connected_at_ = now_s();
        const Value* server = session.metadata("server");
        log(false, cat({"connected to ", options_.url, ", server ", quote(server != nullptr ? server->text : "unknown")}));
        session.infer(out, options_.reuse, session.offers("env-spec") ? env_spec_ : "");
        for (Rows stepping;; stepping.clear()) {
            connection.queue(out), out.clear();
            if (stop_.load()) throw Stopped{};
            connection.flush();  // a feedback and the infer behind it in one send
            receive(forever);
            for (const size_t i : batch_.all) if (!batch_.rows[i].resetting) stepping.push_back(i);
            batch_.step(session.action(), stepping); summary_.steps = batch_.steps; session.feedback(out, stepping);
            connection.queue(out), out.clear();
            for (Row& row : batch_.rows) {
                if (row.resetting) batch_.reset(row, row.seed, row.options);
                if (row.resetting || !row.ended) continue;
                if (summary_.returns.size() == 1000) summary_.returns.erase(summary_.returns.begin());
                summary_.returns.push_back(row.ret), ++summary_.episodes, summary_.total_return += row.ret;
                batch_.reset(row, Seed());
            }
            session.infer(out, options_.reuse, "");
        }
    }
    void pause(const string& error) {  // until the next try, longer from try to try and jittered; or give up
        if (++tries_; remaining_s() <= 0)
            throw ConnectTimeout(cat({"no server at ", options_.url, " for ", static_cast<int>(without_server_s_), " s (", tries_,
                                      " tries); the last one: ", error}));
        const double jitter = 0.5 + 0.5 * static_cast<double>(std::random_device()()) / 4294967296.0;
        const double longest = std::min(options_.max_backoff, 0.2 * std::ldexp(1.0, std::min(tries_ - 1, 60)));
        const double wait_s = std::min(remaining_s(), jitter * longest), until = now_s() + wait_s;
        if (connected_at_ != 0 || (tries_ & (tries_ - 1)) == 0)  // waiting for a trainer that starts is said less and less
            log(true, cat({error, "; trying again (", tries_, " so far)"}));
        for (double left = wait_s; left > 0; left = until - now_s()) {
            if (stop_.load()) throw Stopped{};
            ::poll(nullptr, 0, static_cast<int>(std::min(0.1, left) * 1000) + 1);
        }
        without_server_s_ += wait_s;
    }
    const Options options_; Batch batch_; string env_spec_; Summary summary_; std::atomic<bool> stop_{false};
    static_assert(std::atomic<bool>::is_always_lock_free, "for signal handlers");
    int tries_ = 0; double without_server_s_ = 0, connected_at_ = 0;
};
inline Summary run(Options options, Envs envs) { return Client(std::move(options), std::move(envs)).run(); }

}  // namespace plugrl

#endif

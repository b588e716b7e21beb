// Drive the parts of plugrl_client.hpp that need no socket, for tests/cpp/test_wire.py.
//
//   wire dump FILE...            one JSON line per file: what was decoded, and whether encoding it gives the same bytes
//   wire refuse FILE...          one line per file: by which clause the reader and the session refuse it
//   wire play STEP...            steps s:FILE, infer and feedback on one session of two envs; "ok", or the clause
//   wire fuzz COUNT SEED FILE... mutated messages through reader, writer, session and frames; "ok"
//   wire frames                  the WebSocket's known answers; "ok"
//   wire bounds                  sizes, names and spaces that are to be refused; "ok"
//   wire digest FLAGS REWARD ENTRY...
//                                the sum of a row of words [step-digest]: FLAGS, REWARD as the hexadecimal digits of a
//                                double, and entries SPACE:DTYPE:BYTES: typestrs of the space and of the value, bytes
//                                in hexadecimal
#include <cinttypes>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>

#include "plugrl_client.hpp"

using plugrl::Kind;
using plugrl::Value;

namespace {

[[noreturn]] void fail(const std::string& what) {
    std::cerr << what << '\n';
    std::exit(1);
}
void check(bool good, const std::string& what) {
    if (!good) fail("failed: " + what);
}

std::string slurp(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) fail("cannot read " + path);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void json_text(std::ostream& out, const std::string& utf8) {
    out << '"';
    for (const char c : utf8) {
        const auto byte = static_cast<unsigned char>(c);
        if (c == '"' || c == '\\')
            out << '\\' << c;
        else if (byte < 0x20)
            out << "\\u00" << "0123456789abcdef"[byte >> 4] << "0123456789abcdef"[byte & 15];
        else
            out << c;
    }
    out << '"';
}

void json_real(std::ostream& out, double value) {
    char digits[40];
    std::snprintf(digits, sizeof digits, "%.17g", value);
    if (std::isnan(value))
        out << "NaN";
    else if (std::isinf(value))
        out << (value < 0 ? "-Infinity" : "Infinity");
    else
        out << digits << (std::string(digits).find_first_of(".e") == std::string::npos ? ".0" : "");
}

void json_points(std::ostream& out, const char* at, const plugrl::Dtype& dtype) {
    out << '[';
    for (std::uint32_t i = 0; i < dtype.size; i += 4)
        out << (i > 0 ? "," : "") << plugrl::load_bits(at + i, {dtype.order, 'u', 4});
    out << ']';
}

void json(std::ostream& out, const Value& value) {
    const auto items = [&](std::size_t step, const char* open, const char* close) {
        out << open;
        for (std::size_t i = 0; i < value.items.size(); i += step) {
            if (i > 0) out << ',';
            if (step == 2) {
                if (value.items[i].is(Kind::text))
                    json_text(out, value.items[i].text);
                else
                    json_text(out, "$bin:" + value.items[i].text);
                out << ':';
            }
            json(out, value.items[i + step - 1]);
        }
        out << close;
    };
    switch (value.kind) {
        case Kind::nil:
            out << "null";
            break;
        case Kind::boolean:
            out << (value.number != 0 ? "true" : "false");
            break;
        case Kind::integer:
            out << value.number;
            break;
        case Kind::natural:
            out << static_cast<std::uint64_t>(value.number);
            break;
        case Kind::real:
            json_real(out, value.real);
            break;
        case Kind::text:
            json_text(out, value.text);
            break;
        case Kind::bytes:
            out << "{\"$bin\":\"";
            for (const char c : value.text)
                out << "0123456789abcdef"[static_cast<unsigned char>(c) >> 4]
                    << "0123456789abcdef"[static_cast<unsigned char>(c) & 15];
            out << "\"}";
            break;
        case Kind::list:
            items(1, "[", "]");
            break;
        case Kind::map:
            items(2, "{", "}");
            break;
        case Kind::scalar:
            out << "{\"$scalar\":{\"dtype\":\"" << value.dtype.str() << "\",\"value\":";
            json(out, value.items.at(0));
            out << "}}";
            break;
        case Kind::array:
            out << "{\"$array\":{\"dtype\":\"" << value.dtype.str() << "\",\"shape\":[";
            for (std::size_t i = 0; i < value.shape.size(); ++i) out << (i > 0 ? "," : "") << value.shape[i];
            out << "],\"values\":[";
            for (std::size_t i = 0; i < value.count(); ++i) {
                std::int64_t whole = 0;
                if (i > 0) out << ',';
                if (value.dtype.kind == 'U')
                    json_points(out, value.at(i), value.dtype);
                else if (value.dtype.kind == 'f')
                    json_real(out, plugrl::load_real(value.at(i), value.dtype));
                else if (value.dtype.kind == 'b')
                    out << (plugrl::load_bits(value.at(i), value.dtype) != 0 ? "true" : "false");
                else if (plugrl::load_integer(value.at(i), value.dtype, whole))
                    out << whole;
                else
                    out << plugrl::load_bits(value.at(i), value.dtype);
            }
            out << "]}}";
    }
}

// An env of the shapes that the vectors have, and of every other kind of entry.
class Anything : public plugrl::Env {
public:
    explicit Anything(bool large) : large_(large) {}
    plugrl::Spec spec() const override {
        plugrl::Spec spec;
        spec.observation = {{"state", plugrl::box<double>({3}, -1.0, 1.0)}};
        if (large_) {
            spec.observation.push_back({"front", plugrl::image(2, 3, 3)});
            spec.observation.push_back({"gear", plugrl::discrete(5, -2)});
            spec.observation.push_back({"flags", plugrl::multi_binary(3)});
            spec.observation.push_back({"levels", plugrl::multi_discrete({3, 4})});
            spec.observation.push_back({"half", plugrl::box<float>({2, 1}, {-1.0F, 0.0F}, {1.0F, 2.0F})});
            spec.observation.push_back({"task", plugrl::text(20, "abc")});
        }
        spec.action = plugrl::box<float>({2}, -1.0F, 1.0F);
        return spec;
    }
    void reset(const plugrl::Seed& seed, plugrl::Observation& first) override {
        first.set(0, {seed ? static_cast<double>(*seed) : 0.5, -1.25, 3.0});
        if (!large_) return;
        std::uint8_t* const pixels = first.at<std::uint8_t>(1);
        for (std::uint8_t i = 0; i < 18; ++i) pixels[i] = i;
        first.set(2, {std::int64_t{-2}});
        first.set(3, {std::int8_t{1}, std::int8_t{0}, std::int8_t{1}});
        first.set(4, {std::int64_t{2}, std::int64_t{3}});
        first.set(5, {0.25F, 0.5F});
        first.set_text(6,
                       "gr\xC3\xB6\xC3\x9F"
                       "er");
    }
    plugrl::Step step(const plugrl::Action& action, plugrl::Observation& next) override {
        for (std::size_t i = 0; i < action.size; ++i) sum_ += action[i];
        next.set(0, {sum_, 0.0, 0.0});
        plugrl::Step done;
        done.reward = 1.0;
        done.truncated = ++steps_ % 3 == 0;
        done.success = true;
        return done;
    }

private:
    bool large_;
    double sum_ = 0;
    int steps_ = 0;
};

plugrl::Batch batch_of(std::size_t n, bool large) {
    plugrl::Envs envs;
    for (std::size_t i = 0; i < n; ++i) envs.push_back(std::make_unique<Anything>(large));
    plugrl::Batch batch(std::move(envs));
    for (plugrl::Row& row : batch.rows) batch.reset(row, {});
    return batch;
}

template <class Call>
std::string clause_of(Call&& call) {
    try {
        call();
    } catch (const plugrl::ProtocolError& refused) {
        return refused.detail;
    }
    return "none";
}

const std::string& metadata() {
    static const std::string bytes = [] {
        Value list = Value::of(Kind::list), map = Value::of(Kind::map), data = Value::of(Kind::map);
        const auto text = [](const std::string& content) {
            Value value = Value::of(Kind::text);
            value.text = content;
            return value;
        };
        for (const char* feature : {"reuse-feedback-obs", "env-spec", "seeded-reset"})
            list.items.push_back(text(feature));
        data.items = {text("features"), list};
        map.items = {text("message_type"), text("metadata"), text("data"), data};
        return plugrl::encode(map);
    }();
    return bytes;
}

plugrl::Session asked(plugrl::Batch& batch) {
    plugrl::Session session(batch);
    std::string out;
    session.receive(metadata());
    session.infer(out, true, "");
    return session;
}

int dump(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
        const std::string bytes = slurp(path);
        const Value value = plugrl::decode(bytes);
        const std::string again = plugrl::encode(value);
        check(plugrl::encode(plugrl::decode(again)) == again, path + ": what was encoded is decoded to something else");
        std::cout << "{\"same\":" << (again == bytes ? "true" : "false") << ",\"content\":";
        json(std::cout, value);
        std::cout << "}\n";
    }
    return 0;
}

int refuse(const std::vector<std::string>& paths) {
    plugrl::Batch batch = batch_of(2, false);
    for (const std::string& path : paths) {
        const std::string bytes = slurp(path);
        const std::string reader = clause_of([&] { plugrl::decode(bytes); });
        const std::string first = clause_of([&] { plugrl::Session(batch).receive(bytes); });
        const std::string later = clause_of([&] { asked(batch).receive(bytes); });
        std::cout << reader << ' ' << first << ' ' << later << '\n';
    }
    return 0;
}

int play(const std::vector<std::string>& steps) {
    plugrl::Batch batch = batch_of(2, false);
    plugrl::Session session(batch);
    std::string out;
    for (const std::string& step : steps) {
        const std::string clause = clause_of([&] {
            if (step == "infer")
                session.infer(out, true, "");
            else if (step == "feedback")
                session.feedback(out, batch.all);
            else
                session.receive(slurp(step.substr(2)));
        });
        std::cout << (clause == "none" ? "ok" : clause) << '\n';
        if (clause != "none") return 0;
    }
    return 0;
}

std::string mutated(const std::vector<std::string>& corpus, const std::vector<std::string>& actions,
                    std::mt19937_64& random) {
    const std::vector<std::string>& from = random() % 2 == 0 ? corpus : actions;
    std::string bytes = from[random() % from.size()];
    if (bytes.size() > 4096) bytes.resize(4096);
    for (std::uint64_t edits = random() % 4 + 1; edits > 0; --edits) {
        const std::size_t at = bytes.empty() ? 0 : random() % bytes.size();
        static const unsigned char heads[] = {0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xC3,
                                              0xC4, 0xC6, 0xC7, 0xCA, 0xCB, 0xCF, 0xD3, 0xD4, 0xD9, 0xDB,
                                              0xDC, 0xDD, 0xDE, 0xDF, 0xE0, 0xFF, 0x00, 0x7F};
        switch (random() % 7) {
            case 0:
                if (!bytes.empty()) bytes[at] = static_cast<char>(random());
                break;
            case 1:
                if (!bytes.empty()) bytes[at] = static_cast<char>(heads[random() % sizeof heads]);
                break;
            case 2:
                if (!bytes.empty())
                    bytes[at] = static_cast<char>(static_cast<unsigned char>(bytes[at]) ^ (1U << random() % 8));
                break;
            case 3:
                bytes.insert(at, 1, static_cast<char>(heads[random() % sizeof heads]));
                break;
            case 4:
                bytes.erase(at, random() % 9);
                break;
            case 5:
                bytes.resize(at);
                break;
            default: {
                const std::string& other = corpus[random() % corpus.size()];
                if (!other.empty()) bytes.insert(at, other.substr(random() % other.size(), random() % 64));
            }
        }
    }
    return bytes;
}

void feed_frames(const std::string& bytes, std::size_t max_bytes) {
    plugrl::FrameReader reader(max_bytes);
    std::size_t total = 0;
    for (std::size_t at = 0; at < bytes.size();) {
        const auto [place, size] = reader.room();
        const std::size_t part = std::min({size, bytes.size() - at, std::size_t{1} + at % 7});
        std::memcpy(place, bytes.data() + at, part);
        reader.filled(part);
        at += part;
        for (plugrl::Event event; reader.next(event);)
            for (const char c : event.payload) total += static_cast<unsigned char>(c);
    }
    if (total == 12345678) std::cout << ' ';  // the payloads are to be read, not optimised away
}

int fuzz(std::uint64_t count, std::uint64_t seed, const std::vector<std::string>& paths) {
    std::vector<std::string> corpus;
    std::vector<std::string> actions;
    for (const std::string& path : paths) {
        corpus.push_back(slurp(path));
        if (path.find("messages/action_") != std::string::npos) actions.push_back(corpus.back());
    }
    check(!actions.empty(), "there are actions among the files");
    std::mt19937_64 random(seed);
    plugrl::Batch batch = batch_of(2, true);
    std::uint64_t decoded = 0, accepted = 0, as_frames = 0;
    for (std::uint64_t i = 0; i < count; ++i) {
        const std::string bytes = mutated(corpus, actions, random);
        const auto sane = [&bytes](const std::string& clause) {
            check(clause == "none" || bytes.size() < (1U << 20), "a refusal");
            return clause == "none";
        };
        decoded += sane(clause_of([&] {
            const std::string again = plugrl::encode(plugrl::decode(bytes));
            check(plugrl::encode(plugrl::decode(again)) == again, "what was encoded is decoded to something else");
        }));
        clause_of([&] { plugrl::Session(batch).receive(bytes); });
        accepted += sane(clause_of([&] {
            plugrl::Session session = asked(batch);
            session.receive(bytes);
            plugrl::Rows stepping;
            for (const std::size_t row : batch.all)
                if (!batch.rows[row].resetting) stepping.push_back(row);
            batch.step(session.action(), stepping);
            std::string out;
            session.feedback(out, stepping);
            plugrl::decode(out);
            for (plugrl::Row& row : batch.rows)
                if (row.resetting) batch.reset(row, row.seed, row.options);
            out.clear();
            session.infer(out, true, "");
            plugrl::decode(out);
        }));
        as_frames += sane(clause_of([&] { feed_frames(bytes, 1000); }));
        std::string frame{'\x82', static_cast<char>(bytes.size() & 127)};
        frame[1] = static_cast<char>(frame[1] >= 126 ? 125 : frame[1]);
        clause_of([&] { feed_frames(frame + bytes, 100000); });
    }
    check(decoded > 0 && accepted > 0 && as_frames > 0, "some mutants are fine");
    std::cout << "ok, " << count << " mutants: " << decoded << " decoded, " << accepted << " accepted as actions\n";
    return 0;
}

// === The WebSocket
// ====================================================================================================

std::string hex(const std::string& bytes) {
    std::ostringstream out;
    for (const char c : bytes)
        out << "0123456789abcdef"[static_cast<unsigned char>(c) >> 4]
            << "0123456789abcdef"[static_cast<unsigned char>(c) & 15];
    return out.str();
}

std::string server_frame(unsigned first, const std::string& payload) {
    std::string out(1, static_cast<char>(first));
    if (payload.size() < 126) {
        out += static_cast<char>(payload.size());
    } else {
        const int wide = payload.size() < 65536 ? 2 : 8;
        out += static_cast<char>(wide == 2 ? 126 : 127);
        for (int i = wide; i > 0; --i) out += static_cast<char>(payload.size() >> (8 * (i - 1)) & 0xFF);
    }
    return out + payload;
}

// Feed bytes in parts; give what came of it, "op:payload" each, or the close code of the error.
std::string events(const std::string& bytes, std::size_t part, std::size_t max_bytes = 1 << 20) {
    plugrl::FrameReader reader(max_bytes);
    std::string out;
    try {
        for (std::size_t at = 0; at < bytes.size(); at += part) {
            const std::size_t size = std::min({part, bytes.size() - at, reader.room().second});
            std::memcpy(reader.room().first, bytes.data() + at, size);
            reader.filled(size);
            for (plugrl::Event event; reader.next(event);)
                out += std::to_string(static_cast<int>(event.op)) + ':' +
                       (event.payload.size() < 20 ? std::string(event.payload) : std::to_string(event.payload.size())) +
                       ' ';
        }
    } catch (const plugrl::ProtocolError& refused) {
        check(refused.detail == "1", "clause of a broken frame");
        out += std::to_string(refused.code);
    }
    return out;
}

int frames() {
    check(hex(plugrl::sha1("")) == "da39a3ee5e6b4b0d3255bfef95601890afd80709", "SHA-1 of nothing");
    check(hex(plugrl::sha1("abc")) == "a9993e364706816aba3e25717850c26c9cd0d89d", "SHA-1 of abc");
    check(hex(plugrl::sha1("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
              "84983e441c3bd26ebaae4aa1f95129e5e54670f1",
          "SHA-1 of two blocks");
    check(hex(plugrl::sha1(std::string(1000000, 'a'))) == "34aa973cd4c4daa4f61eeb2bdbad27316534016f",
          "SHA-1 of a million");
    for (const auto& [plain, coded] : {std::pair<const char*, const char*>{"", ""},
                                       {"f", "Zg=="},
                                       {"fo", "Zm8="},
                                       {"foo", "Zm9v"},
                                       {"foob", "Zm9vYg=="},
                                       {"fooba", "Zm9vYmE="},
                                       {"foobar", "Zm9vYmFy"}})
        check(plugrl::base64(plain) == coded, std::string("base64 of ") + plain);
    check(plugrl::accept_of("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=",
          "the accept key of RFC 6455");

    // What a client sends: RFC 6455's own example, and the three lengths, unmasked again.
    const unsigned char key_bytes[] = {0x37, 0xfa, 0x21, 0x3d};
    std::uint32_t key = 0;
    std::memcpy(&key, key_bytes, 4);
    std::string sent;
    plugrl::write_frame(sent, plugrl::Op::text, "Hello", key);
    check(hex(sent) == "818537fa213d7f9f4d5158", "the masked Hello of RFC 6455");
    for (const std::size_t size :
         std::initializer_list<std::size_t>{0, 1, 7, 8, 9, 125, 126, 127, 65535, 65536, 70001}) {
        std::string payload, frame;
        for (std::size_t i = 0; i < size; ++i) payload += static_cast<char>(i * 7);
        plugrl::write_frame(frame, plugrl::Op::binary, payload, key);
        const std::size_t head = size < 126 ? 2 : size < 65536 ? 4 : 10;
        check(frame.size() == head + 4 + size && static_cast<unsigned char>(frame[0]) == 0x82, "head of a frame");
        check((frame[1] & 127) == static_cast<int>(size < 126     ? size
                                                   : size < 65536 ? 126
                                                                  : 127) &&
                  (frame[1] & 0x80) != 0,
              "length of a frame");
        for (std::size_t i = 0; i < size; ++i)
            frame[head + 4 + i] = static_cast<char>(frame[head + 4 + i] ^ static_cast<char>(key_bytes[i % 4]));
        check(frame.substr(head + 4) == payload, "mask of a frame");
    }

    // What it receives, whole and in parts.
    const std::string long_ones =
        server_frame(0x82, std::string(126, 'x')) + server_frame(0x82, std::string(65535, 'x')) +
        server_frame(0x82, std::string(65536, 'x')) + server_frame(0x82, std::string(300000, 'x'));
    const std::string fragments = server_frame(0x02, "ab") + server_frame(0x89, "ping") + server_frame(0x00, "") +
                                  server_frame(0x8A, "pong") + server_frame(0x80, "cd") + server_frame(0x82, "e");
    for (const std::size_t part : std::initializer_list<std::size_t>{1, 2, 3, 1000, 60000}) {
        check(events(server_frame(0x82, "") + server_frame(0x81, "Hello"), part) == "2: 1:Hello ", "short frames");
        check(events(long_ones, part) == "2:126 2:65535 2:65536 2:300000 ", "long frames");
        check(events(fragments, part) == "9:ping 10:pong 2:abcd 2:e ", "fragments, and pings between them");
        check(events(server_frame(0x01, "a") + server_frame(0x80, "b"), part) == "1:ab ", "text in fragments is text");
        check(events(server_frame(0x88, "\x03\xe9stop"), part) == "8:\x03\xe9stop ", "a close frame");
        for (const unsigned first : {0xC2U, 0xA2U, 0x92U, 0x83U, 0x87U, 0x8BU, 0x8FU, 0x80U, 0x00U, 0x08U, 0x09U})
            check(events(server_frame(first, "x"), part) == "1002",
                  "a frame that begins with " + std::to_string(first));
        check(events(std::string("\x82\x81\x01\x02\x03\x04x", 7), part) == "1002", "a masked frame");
        check(events(server_frame(0x02, "a") + server_frame(0x82, "b"), part) == "1002", "a message inside another");
        check(events(server_frame(0x89, std::string(126, 'x')), part) == "1002", "a long ping");
        check(events(server_frame(0x82, std::string(1001, 'x')), part, 1000) == "1009", "a message that is too large");
        check(events(server_frame(0x02, std::string(600, 'x')) + server_frame(0x80, std::string(600, 'x')), part,
                     1000) == "1009",
              "fragments that are too large");
        check(events(server_frame(0x02, std::string(1000, 'x')) + server_frame(0x89, "p") + server_frame(0x80, ""),
                     part, 1000) == "9:p 2:1000 ",
              "a ping beside a full message");
    }
    check(events(std::string("\x82\x7f\xff\xff\xff\xff\xff\xff\xff\xff", 10), 10) == "1009", "a length of 2^64 - 1");

    const std::string long_one = "ws://a/" + std::string(500, 'x');
    for (const char* good : {"ws://a", "ws://a/", "ws://a:1/x?y", "ws://[::1]:8000", "ws://[::1]/p",
                             "ws://127.0.0.1:65535", long_one.c_str()})
        plugrl::Url::parse(good);
    for (const char* bad : {"", "a", "http://a", "wss://a:1", "ws://", "ws://:1", "ws://a:0", "ws://a:65536",
                            "ws://a:99999999999999999999", "ws://a:x", "ws://a:", "ws://u@a", "ws://a/#f", "ws://a b",
                            "ws://[::1", "ws://a\r\nX: y"}) {
        bool refused = false;
        try {
            plugrl::Url::parse(bad);
        } catch (const plugrl::UsageError&) {
            refused = true;
        }
        check(refused, std::string("the url ") + bad);
    }
    const plugrl::Url url = plugrl::Url::parse("ws://[::1]:8000/a?b");
    check(url.host == "[::1]" && url.port == "8000" && url.path == "/a?b", "the parts of a url");

    // What the session writes is in the shortest form, and every kind of entry can be written.
    plugrl::Batch batch = batch_of(3, true);
    plugrl::Session session(batch);
    std::string out, spec;
    session.receive(metadata());
    batch.write_spec(spec, 0);
    session.infer(out, true, spec);
    check(plugrl::encode(plugrl::decode(out)) == out, "a canonical infer");
    std::cout << "ok\n";
    return 0;
}

// === What is refused before it is believed ===========================================================================

// An env that is nothing but its spaces.
class Still : public plugrl::Env {
public:
    explicit Still(plugrl::Spec spec) : spec_(std::move(spec)) {}
    plugrl::Spec spec() const override { return spec_; }
    void reset(const plugrl::Seed&, plugrl::Observation&) override {}
    plugrl::Step step(const plugrl::Action& action, plugrl::Observation&) override {
        for (std::size_t i = 0; i < action.size; ++i) check(!std::isnan(action[i]), "an element of an action");
        return {};
    }

private:
    plugrl::Spec spec_;
};

plugrl::Spec spec_of(const plugrl::Space& seen, const plugrl::Space& action) {
    plugrl::Spec spec;
    spec.observation = {{"state", seen}};
    spec.action = action;
    return spec;
}

plugrl::Batch still(std::size_t n, const plugrl::Spec& spec) {
    plugrl::Envs envs;
    for (std::size_t i = 0; i < n; ++i) envs.push_back(std::make_unique<Still>(spec));
    return plugrl::Batch(std::move(envs));
}

template <class Call>
bool is_misuse(Call&& call) {
    try {
        call();
    } catch (const plugrl::UsageError&) {
        return true;
    }
    return false;
}

Value array(const plugrl::Dtype& dtype, const plugrl::Shape& shape, const std::string& data) {
    Value value = Value::of(Kind::array);
    value.dtype = dtype;
    value.shape = shape;
    value.text = data;
    return value;
}

Value map_of(std::initializer_list<std::pair<const char*, Value>> items) {
    Value map = Value::of(Kind::map);
    for (const auto& [name, item] : items) {
        Value key = Value::of(Kind::text);
        key.text = name;
        map.items.push_back(key);
        map.items.push_back(item);
    }
    return map;
}

// Have a session take an action, and the batch run it; give the clause by which one of them refuses it.
std::string clause_of_action(plugrl::Batch& batch, const Value& action, const Value& reset = {}) {
    Value type = Value::of(Kind::text);
    type.text = "action";
    const std::string bytes =
        plugrl::encode(map_of({{"message_type", type}, {"data", map_of({{"action", action}})}, {"reset", reset}}));
    return clause_of([&] {
        plugrl::Session session = asked(batch);
        session.receive(bytes);
        batch.step(session.action(), batch.all);
    });
}

int bounds() {
    const plugrl::Space seen = plugrl::box<double>({3}, -1.0, 1.0), act = plugrl::box<float>({2}, -1.0F, 1.0F);
    const auto bytes = plugrl::Dtype::of<std::uint8_t>();

    // A horizon whose product with the rest wraps: 2^60 steps of 16 elements are 0 of 2^64.
    const std::int64_t endless = std::int64_t{1} << 60;
    for (const std::int64_t width : {2, 16}) {
        plugrl::Batch batch = still(3, spec_of(seen, plugrl::box<float>({width}, -1.0F, 1.0F)));
        check(clause_of_action(batch, array(bytes, {endless, 3, 0}, "")) == "5.3",
              "an action of 2^60 steps and no element");
        const auto size = static_cast<std::size_t>(3 * width);
        check(clause_of_action(batch, array(bytes, {2, 3, width}, std::string(2 * size, '\1'))) == "none",
              "an action of two steps");
        check(clause_of_action(batch, array(bytes, {2, 3, 1, width}, std::string(2 * size, '\1'))) == "none",
              "an action of another form");
        check(clause_of_action(batch, array(bytes, {1, 3, width + 1}, std::string(size + 3, '\1'))) == "5.3",
              "an action that is too wide");
        check(clause_of_action(batch, array(bytes, {3, 3, 1}, std::string(9, '\1'))) == "5.3",
              "an action that is too narrow");
    }

    // A name of -1 in eight bits is no env 255.
    plugrl::Batch many = still(300, spec_of(seen, act));
    const Value none = array(bytes, {1, 300, 2}, std::string(600, '\0'));
    check(clause_of_action(many, none, map_of({{"env_ids", array(plugrl::Dtype::of<std::int8_t>(), {1}, "\xff")}})) ==
              "seeded-reset",
          "env -1");
    check(clause_of_action(many, none, map_of({{"env_ids", array(bytes, {1}, "\xff")}})) == "none" &&
              many.rows[255].resetting,
          "env 255");

    // What is no integer is none for a Box of integers either.
    plugrl::Batch whole = still(1, spec_of(seen, plugrl::box<std::int32_t>({1}, -5, 5)));
    const auto real = [](float number) {
        std::string data(4, '\0');
        std::memcpy(&data[0], &number, 4);
        return array(plugrl::Dtype::of<float>(), {1, 1, 1}, data);
    };
    check(clause_of_action(whole, real(2.0F)) == "none", "an integer as a float");
    for (const float bad : {std::nanf(""), HUGE_VALF, 1e30F})
        check(clause_of_action(whole, real(bad)) == "5.3", "no integer");

    // An observation of a wrong count, nothing at all among them.
    const plugrl::Spec spec = spec_of(seen, act);
    plugrl::Row row;
    row.data.resize(64);
    plugrl::Observation out(spec, row);
    for (const std::size_t count : {0U, 1U, 2U, 4U})
        check(is_misuse([&] { out.set(0, std::vector<double>(count)); }), "a wrong count: " + std::to_string(count));
    check(is_misuse([&] { out.set(0, std::vector<float>(3)); }) && is_misuse([&] { out.at<float>(0); }),
          "a wrong type");
    out.set(0, std::vector<double>{1.0, 2.0, 3.0});
    check(out.at<double>(0)[2] == 3.0, "a right count");
    const plugrl::Spec hollow = spec_of(plugrl::box<double>({0}, -1.0, 1.0), act);
    plugrl::Observation(hollow, row).set(0, std::vector<double>());

    // Spaces that nothing can be made of.
    plugrl::Space boundless = seen, endless_text = plugrl::text(3, "abc"), half = seen;
    boundless.high.clear();
    endless_text.numbers.clear();
    half.low.resize(16);
    const std::int64_t most = std::int64_t{1} << 25;  // doubles
    for (const plugrl::Space& bad : {boundless, endless_text, half, plugrl::text(-1, ""),
                                     plugrl::box<double>({-1}, 0.0, 1.0), plugrl::box<double>({most + 1}, 0.0, 1.0),
                                     plugrl::box<double>({0, endless}, 0.0, 1.0), plugrl::multi_binary(-3)})
        check(is_misuse([&] { still(1, spec_of(bad, act)); }), std::string("an unusable ") + bad.type);
    for (const plugrl::Space& bad :
         {plugrl::box<float>({0}, 0.0F, 1.0F), plugrl::multi_discrete({}), boundless, plugrl::text(3, "abc")})
        check(is_misuse([&] { still(1, spec_of(seen, bad)); }),
              std::string("an action that is an unusable ") + bad.type);
    for (const plugrl::Space& good :
         {plugrl::box<double>({1 << 20}, 0.0, 1.0), plugrl::text(0, ""), plugrl::discrete(3)})
        check(still(2, spec_of(good, plugrl::discrete(2))).rows.size() == 2, std::string("a usable ") + good.type);
    std::cout << "ok\n";
    return 0;
}

int digest(const std::vector<std::string>& rest) {
    plugrl::Digest sum;
    const std::uint64_t bits = std::stoull(rest.at(1), nullptr, 16);
    double reward = 0;
    std::memcpy(&reward, &bits, sizeof reward);
    sum.word(std::stoull(rest.at(0)));
    sum.real(reward);
    for (std::size_t i = 2; i < rest.size(); ++i) {
        const std::size_t first = rest[i].find(':'), second = rest[i].find(':', first + 1);
        std::string bytes;
        for (std::size_t at = second + 1; at < rest[i].size(); at += 2)
            bytes += static_cast<char>(std::stoi(rest[i].substr(at, 2), nullptr, 16));
        sum.add(plugrl::Dtype::parse(rest[i].substr(0, first)), bytes,
                plugrl::Dtype::parse(rest[i].substr(first + 1, second - first - 1)));
    }
    std::printf("%016" PRIx64 "\n", sum.sum);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const std::string command = argc > 1 ? argv[1] : "";
    const std::vector<std::string> rest(argv + std::min(argc, 2), argv + argc);
    if (command == "dump") return dump(rest);
    if (command == "refuse") return refuse(rest);
    if (command == "play") return play(rest);
    if (command == "frames") return frames();
    if (command == "bounds") return bounds();
    if (command == "digest" && rest.size() > 1) return digest(rest);
    if (command == "fuzz" && rest.size() > 2)
        return fuzz(std::stoull(rest[0]), std::stoull(rest[1]), {rest.begin() + 2, rest.end()});
    fail("wire dump|refuse|play|fuzz|frames|bounds|digest …");
}

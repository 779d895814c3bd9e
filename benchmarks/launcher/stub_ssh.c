/* Called as ssh is, it plays the node part (launcher/remote/node.py): says hello, beats, ends each start well.
 *
 * STUB_LOG: a file; each call appends "+<host>" and, when it has said hello, "-<host>".
 * STUB_BAD: a host that does not let in (STUB_HOW=denied) or never answers (STUB_HOW=silent).
 */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES (1 << 20)
#define PART_BYTES 1024

static char token[64], host[256], line[LINE_BYTES];
static size_t filled;

static void note(const char *sign) {
    char text[300];
    const char *path = getenv("STUB_LOG");
    int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0644) : -1;
    if (file < 0) return;
    int length = snprintf(text, sizeof text, "%s%s\n", sign, host);
    if (write(file, text, (size_t)length) < 0) exit(3);
    close(file);
}

/* One part of 1024 bytes, as launcher/remote/frames.py makes them. */
static void say(const char *kind, const char *more) {
    char frame[PART_BYTES + 1];
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int length = snprintf(frame, sizeof frame,
        "\x1e%s %s 0001/0001 {\"kind\":\"%s\",\"sender\":\"%s\",\"now\":%ld.%03ld%s}", token, host, kind,
        host, (long)now.tv_sec, now.tv_nsec / 1000000, more);
    if (length < 0 || length > PART_BYTES - 2) exit(4);
    memset(frame + length, ' ', (size_t)(PART_BYTES - 2 - length));
    memcpy(frame + PART_BYTES - 2, "\x1f\n", 2);
    if (write(1, frame, PART_BYTES) < 0) exit(1);
}

/* The text between the quotes, or the digits, after "key": */
static void value(const char *key, char *into, size_t size) {
    char name[64];
    snprintf(name, sizeof name, "\"%s\":", key);
    const char *at = strstr(line, name);
    into[0] = 0;
    if (!at) return;
    at += strlen(name);
    while (*at == '"' || *at == ' ') at++;
    size_t length = strcspn(at, "\",}");
    if (length >= size) length = size - 1;
    memcpy(into, at, length);
    into[length] = 0;
}

static void obey(int is_first) {
    char kind[32], number[32], more[200];
    if (is_first) {
        value("token", token, sizeof token);
        say("here", "");
        say("hello", ",\"pid\":1,\"address\":\"127.0.0.1\",\"port\":29500");
        note("-");
        return;
    }
    value("kind", kind, sizeof kind);
    if (!strcmp(kind, "quit")) exit(0);
    if (strcmp(kind, "run") && strcmp(kind, "stop")) return;
    value("generation", number, sizeof number);
    snprintf(more, sizeof more,
        ",\"generation\":%s,\"failures\":[],\"finished\":[],\"error\":\"\",\"port\":29500"
        ",\"was_stopped_here\":false",
        number[0] ? number : "0");
    say("ended", more);
}

int main(int argc, char **argv) {
    const char *bad = getenv("STUB_BAD"), *how = getenv("STUB_HOW");
    int is_first = 1;
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], "--")) {
            snprintf(host, sizeof host, "%s", argv[i + 1]);
            break;
        }
    note("+");
    srand((unsigned)getpid());
    usleep(30000 + (useconds_t)(rand() % 50000)); /* the handshake */
    if (bad && !strcmp(bad, host)) {
        if (how && !strcmp(how, "silent")) pause();
        fprintf(stderr, "%s: Permission denied (publickey).\n", host);
        note("-");
        return 255;
    }
    for (;;) {
        struct pollfd input = {0, POLLIN, 0};
        if (poll(&input, 1, 1500) == 0) {
            if (!is_first) say("beat", "");
            continue;
        }
        ssize_t count = read(0, line + filled, LINE_BYTES - 1 - filled);
        if (count <= 0) return 0;
        filled += (size_t)count;
        line[filled] = 0;
        for (char *end; (end = memchr(line, '\n', filled)) != NULL;) {
            *end = 0;
            obey(is_first);
            is_first = 0;
            filled -= (size_t)(end + 1 - line);
            memmove(line, end + 1, filled);
            line[filled] = 0;
        }
    }
}

/* surestep-health HOST:PORT [NAME] | http://HOST:PORT/PATH: for containers; 0 = healthy.
 *
 * Asks what `python -m surestep_common.healthcheck` asks, without the 200 ms of CPU that a Python
 * takes to start: overall health of a gRPC service, or that of NAME (`live`: it answers at all), or
 * any answer below 400 to a GET. Says what is wrong. Hosts are numeric. A service that does not
 * answer in plain text speaks TLS, of which the Python knows: it takes over.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

enum { TIMEOUT_S = 3, TLS_ALERT = 0x15, NAME_BYTES = 100 };
enum { DATA = 0, HEADERS = 1, RST_STREAM = 3, SETTINGS = 4, GOAWAY = 7 }; /* frames of HTTP/2 */
enum { END_STREAM = 1, END_HEADERS = 4 };

static const char *const STATUSES[] = {"UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"};

static char **arguments;

static int say(const char *what)
{
    printf("%s\n", what);
    return 1;
}

static int ask_python(void)
{
    static const char plain[] = "http://";
    char url[512];
    if (!strncmp(arguments[1], plain, sizeof plain - 1)) {
        snprintf(url, sizeof url, "https://%s", arguments[1] + sizeof plain - 1);
        arguments[1] = url;
    }
    char *command[] = {"python", "-m", "surestep_common.healthcheck", arguments[1], arguments[2],
                       NULL};
    execvp(command[0], command);
    return say("no answer in plain text, and no Python to ask otherwise");
}

/* A connected socket with a limit on every wait; -1 with errno. */
static int reach(const struct sockaddr_in *address)
{
    struct timeval limit = {.tv_sec = TIMEOUT_S};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    return connect(fd, (const struct sockaddr *)address, sizeof *address) ? -1 : fd;
}

/* Fill the buffer; what is there before the end or an error, of which errno tells. */
static size_t receive(int fd, uint8_t *buffer, size_t size)
{
    size_t have = 0;
    errno = 0;
    while (have < size) {
        ssize_t got = recv(fd, buffer + have, size - have, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break;
        have += (size_t)got;
    }
    return have;
}

static int silent(void) { return errno == EAGAIN || errno == EWOULDBLOCK; }

static int ask_http(int fd, const char *host, const char *path)
{
    char text[512];
    int length = snprintf(text, sizeof text,
                          "GET /%s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", path, host);
    if (length >= (int)sizeof text) return say("the URL is too long");
    if (send(fd, text, (size_t)length, MSG_NOSIGNAL) != length) return say(strerror(errno));
    size_t have = receive(fd, (uint8_t *)text, sizeof text - 1);
    if (!have && silent()) return say("no answer");
    text[have] = 0;
    int status = 0;
    if (sscanf(text, "HTTP/1.%*c %d", &status) != 1) return ask_python();
    if (status < 400) return 0;
    const char *body = strstr(text, "\r\n\r\n");
    return say(body && body[4] ? body + 4 : "an error without words");
}

static uint8_t *put(uint8_t *to, const void *from, size_t size)
{
    memcpy(to, from, size);
    return to + size;
}

static uint8_t *put_frame(uint8_t *to, size_t length, int type, int flags, int stream)
{
    uint8_t head[] = {0, (uint8_t)(length >> 8), (uint8_t)length, (uint8_t)type, (uint8_t)flags,
                      0, 0,                      0,               (uint8_t)stream};
    return put(to, head, sizeof head);
}

/* The call grpc.health.v1.Health/Check on stream 1. Headers are literals and of the static table. */
static size_t write_call(uint8_t *call, const char *name)
{
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    static const char headers[] =
        "\x83\x86"                             /* :method POST, :scheme http */
        "\x04\x1c/grpc.health.v1.Health/Check" /* :path */
        "\x01\x09localhost"                    /* :authority */
        "\x0f\x10\x10" "application/grpc"      /* content-type */
        "\x00\x02te\x08trailers";
    size_t size = strlen(name), message = size ? size + 2 : 0;
    uint8_t *end = put(call, preface, sizeof preface - 1);
    end = put_frame(end, 0, SETTINGS, 0, 0);
    end = put_frame(end, sizeof headers - 1, HEADERS, END_HEADERS, 1);
    end = put(end, headers, sizeof headers - 1);
    end = put_frame(end, 5 + message, DATA, END_STREAM, 1);
    end = put(end, (uint8_t[]){0, 0, 0, 0, (uint8_t)message}, 5);
    if (size) {
        end = put(end, (uint8_t[]){0x0a, (uint8_t)size}, 2); /* field 1: the service */
        end = put(end, name, size);
    }
    return (size_t)(end - call);
}

static int ask_grpc(int fd, const char *name)
{
    uint8_t call[512], head[9], body[16384];
    if (strlen(name) > NAME_BYTES) return say("the name is too long");
    size_t size = write_call(call, name);
    if (send(fd, call, size, MSG_NOSIGNAL) != (ssize_t)size) return say(strerror(errno));
    for (int first = 1;; first = 0) {
        size_t have = receive(fd, head, sizeof head);
        if (have < sizeof head && silent()) return say("no answer");
        if (first && (have < sizeof head || head[0] == TLS_ALERT || head[3] != SETTINGS))
            return ask_python();
        if (have < sizeof head) return say("the connection broke");
        size_t length = (size_t)head[0] << 16 | (size_t)head[1] << 8 | head[2];
        if (length > sizeof body) return say("too large a frame");
        if (receive(fd, body, length) < length) return say("the connection broke");
        if (head[3] == GOAWAY || head[3] == RST_STREAM) return say("the call was refused");
        if (head[8] != 1) continue;
        if (head[3] == DATA && length >= 5) { /* field 1: the status, UNKNOWN when it is left out */
            unsigned status = length >= 7 && body[5] == 0x08 ? body[6] : 0;
            return status == 1 ? 0 : say(status < 4 ? STATUSES[status] : "another status");
        }
        if (head[3] == HEADERS && head[4] & END_STREAM) return say("the call failed");
    }
}

int main(int count, char **given)
{
    static const char scheme[] = "http://";
    char host[64];
    arguments = given;
    if (count < 2 || count > 3) {
        fprintf(stderr, "usage: surestep-health HOST:PORT [NAME] | http://HOST:PORT/PATH\n");
        return 2;
    }
    int http = !strncmp(given[1], scheme, sizeof scheme - 1);
    const char *target = given[1] + (http ? sizeof scheme - 1 : 0), *path = strchrnul(target, '/');
    snprintf(host, sizeof host, "%.*s", (int)(path - target), target);
    char *colon = strchr(host, ':');
    struct sockaddr_in address = {.sin_family = AF_INET};
    if (!colon) return ask_python();
    address.sin_port = htons((uint16_t)atoi(colon + 1));
    *colon = 0;
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) return ask_python();
    *colon = ':';
    alarm(2 * TIMEOUT_S); /* whatever drips in slowly */
    int fd = reach(&address);
    if (fd < 0) return say(strerror(errno));
    return http ? ask_http(fd, host, *path ? path + 1 : "") : ask_grpc(fd, count > 2 ? given[2] : "");
}

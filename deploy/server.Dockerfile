# The server: `rolltap serve`, and with --target engine a model server on CPUs beside it. From the root of the repository:
#   docker build -f deploy/server.Dockerfile -t rolltap-server:latest .
# The base image is named by tag; name it by the digest that you have checked: --build-arg BASE=python@sha256:...
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
RUN python -m venv /opt/rolltap
ENV PATH=/opt/rolltap/bin:$PATH
COPY requirements/server.txt requirements/server.txt
RUN pip install --no-cache-dir --require-hashes -r requirements/server.txt
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY proxy proxy
COPY reconstructor reconstructor
COPY trainer_client trainer_client
COPY harnesses harnesses
RUN pip install --no-cache-dir --no-deps . \
    && ln -s "$(python -c 'from rolltap.engine.tiny import FOLDER; print(FOLDER)')" /opt/rolltap/tiny

# Its torch comes without a hash: each platform has a build of its own.
FROM build AS build-engine
RUN pip install --no-cache-dir -c constraints.txt ".[train]"

FROM ${BASE} AS engine
COPY --from=build-engine /opt/rolltap /opt/rolltap
ENV PATH=/opt/rolltap/bin:$PATH
RUN useradd --uid 10001 --no-create-home rolltap
USER 10001
EXPOSE 8730
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8730/health', timeout=2)"]
ENTRYPOINT ["rolltap"]
CMD ["engine", "--host", "0.0.0.0", "--port", "8730"]

FROM ${BASE} AS server
COPY --from=build /opt/rolltap /opt/rolltap
ENV PATH=/opt/rolltap/bin:$PATH \
    ROLLTAP_DATA=/data \
    ROLLTAP_LISTEN__HOST=0.0.0.0 \
    ROLLTAP_LOG_FORMAT=json
RUN useradd --uid 10001 --no-create-home rolltap && install -d -o rolltap -m 700 /data
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8710 8711 8712
# Is the process alive? /ready says whether it takes calls, which a restart does not mend.
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8712/health', timeout=2)"]
# SIGTERM drains: give `docker stop` longer than limits.drain_s.
STOPSIGNAL SIGTERM
ENTRYPOINT ["rolltap"]
CMD ["serve", "--config", "/etc/rolltap/rolltap.toml"]

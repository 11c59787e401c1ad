"""A real nginx before some servers, on ports of its own; it treats them as `deploy/nginx` does, without stickiness."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from ..conftest import free_port

CONF = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream plane {{ {servers} {kept} }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://plane; proxy_http_version 1.1;
      proxy_set_header Connection ""; proxy_set_header Host $http_host;
      proxy_connect_timeout 2s; proxy_read_timeout 15m; proxy_buffering off;
    }}
  }}
}}
"""


def nginx_command() -> str:
    """Debian keeps it where only root's PATH looks."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    assert found, "nginx is missing: run scripts/servers.sh"
    return found


@asynccontextmanager
async def nginx(folder: Path, upstreams: Sequence[int], kept: int = 0) -> AsyncIterator[str]:
    """Its URL, once it listens. `upstreams` are ports of the loopback, of which it keeps so many idle connections."""
    port = free_port()
    servers = " ".join(f"server 127.0.0.1:{each} max_fails=1 fail_timeout=1s;" for each in upstreams)
    conf = folder / "nginx.conf"
    conf.write_text(CONF.format(folder=folder, port=port, servers=servers, kept=f"keepalive {kept};" if kept else ""))
    command = [nginx_command(), "-c", str(conf), "-e", str(folder / "error.log"), "-p", str(folder)]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with asyncio.timeout(10):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    break
                except OSError:
                    await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 10)

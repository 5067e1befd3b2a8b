# The rehearsal where there is no Linux: docs/local.md.
FROM debian:12
RUN apt-get update && apt-get install -y --no-install-recommends \
    systemd-container cloud-init openssh-server openssh-client sudo nftables rsync iproute2 e2fsprogs \
    python3 python3-venv ca-certificates
COPY . /src
RUN python3 -m venv /opt/awsddp
RUN /opt/awsddp/bin/pip install --no-cache-dir '/src[local]'
ENV PATH=/opt/awsddp/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# Not on the image's own overlay, which cannot be the upper layer of a node's.
VOLUME ["/root/.awsddp", "/var/cache/awsddp"]
ENTRYPOINT ["awsddp"]

#!/usr/bin/env bash
# Prints the Secret with the broker's passwords, new ones each time, and with the URL of each role:
#   graphs/kubernetes/nats/make-secret.sh | kubectl apply -f -
set -euo pipefail

echo "apiVersion: v1"
echo "kind: Secret"
echo "metadata:"
echo "  name: semkv-nats"
echo "stringData:"
for role in setup router worker; do
  password="p$(openssl rand -hex 24)"  # begins with a letter, since the server would read a number as one
  echo "  SEMKV_$(tr a-z A-Z <<< "$role")_PASSWORD: $password"
  echo "  ${role}_url: nats://semkv-$role:$password@semkv-nats:4222"
done

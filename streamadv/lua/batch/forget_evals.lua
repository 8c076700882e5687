-- The trainer goes on from this version: what evaluation has shown of later ones is of weights that were taken back. Nor
-- do groups count for them that were begun under an older epoch.
-- KEYS  void, trainer, evals
-- fenced by trainer
-- ARGV  fence, version, names of rounds to forget, each
-- Returns  names of other rounds that have a later version here: all shards forget those together
local gone, found, flat = {}, {}, redis.call('HGETALL', keys.evals)
for i = 3, #ARGV do gone[ARGV[i]] = true end
for i = 1, #flat, 2 do
  local field, round = flat[i], string.match(flat[i], '^round (%S+) ')
  local version = tonumber(string.match(field, '^(%d+) ') or round and string.match(flat[i + 1], '(%S+) %S+$') or '')
  local is_later = version and version > tonumber(ARGV[2])
  if round and gone[round] or not round and is_later then
    redis.call('HDEL', keys.evals, field)
  elseif is_later then
    found[#found + 1] = round
  end
end
redis.call('HSET', keys.evals, 'restored', ARGV[2] .. ' ' .. ARGV[1])
if (tonumber(redis.call('HGET', keys.evals, 'floor') or '') or -1) > tonumber(ARGV[2]) then
  redis.call('HSET', keys.evals, 'floor', ARGV[2])
end
return found

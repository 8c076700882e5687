-- What evaluation groups have shown, by data source and round, or policy version where a group names no round.
-- KEYS  evals
-- The hash `evals` of a shard:
--   '<version> <data source>'      sums over groups, see `note_evaluation`; version '-' = their members have none
--   'round <name> <data source>'   the same sums, and oldest version, newest version and when its last group was opened
--                                  (ms); newest -1 = their members have none
--   'floor'     results of this version and lower ones were removed, and are not taken any more
--   'restored'  '<version> <epoch>': the trainer went back to this version and took this epoch
local MAX_EVALS, MAX_ROUND = 1000, 800  -- pairs kept; bytes of a round's name
local TABLE_HEAD, RECORD, FLAGS_AT, OLDEST_AT, NEWEST_AT, HAS_VERSION = 16, 56, 3, 24, 32, 4  -- of a member table, see member_table.py

-- A version of the member at this position of a packet, or nil. from: OLDEST_AT or NEWEST_AT.
local function version_at(packet, position, from)
  local at = TABLE_HEAD + RECORD * (position - 1) + 1
  local flags = string.byte(packet.table, at + FLAGS_AT)
  if not flags or flags % (2 * HAS_VERSION) < HAS_VERSION then return nil end
  local version, bytes = 0, {string.byte(packet.table, at + from, at + from + 6)}
  for i = #bytes, 1, -1 do version = 256 * version + bytes[i] end
  return version
end

-- Oldest and newest version of the members that count, or nil; without such members the one the group was begun at.
local function versions_of_group(group)
  local oldest, newest, counted = nil, nil, false
  for _, packet in ipairs(group.packets) do
    for position, member in ipairs(packet.members) do
      if member.counts then
        counted = true
        local first, last = version_at(packet, position, OLDEST_AT), version_at(packet, position, NEWEST_AT)
        if first then oldest, newest = math.min(first, oldest or first), math.max(last, newest or last) end
      end
    end
  end
  if not counted then oldest, newest = tonumber(group.version), tonumber(group.version) end
  return oldest, newest
end

-- The round that the group was begun in, or nil. Only evaluation groups have the field: see lib/admit.
local function round_of(group)
  local round = redis.call('HGET', group.hash, 'round')
  return round and #round <= MAX_ROUND and string.match(round, '^%S+$')
end

-- Whether results of this version are kept: those of weights that the trainer has taken back are not. A round has no floor.
local function is_kept(group, version, round)
  local f = redis.call('HMGET', keys.evals, 'floor', 'restored')
  if not round and version <= (tonumber(f[1] or '') or -2) then return false end
  local restored, epoch = string.match(f[2] or '', '^(%d+) (%d+)$')
  return not restored or version <= tonumber(restored) or tonumber(group.epoch) >= tonumber(epoch)
end

-- What a pair is removed with, its version (of a round the newest), and of a round when its last group was opened.
local function rank_of(field, value)
  local round, newest, opened = string.match(field, '^round %S+ '), string.match(value, '(%S+) (%S+)$')
  if round then return round, tonumber(newest or '') or -1, tonumber(opened or '') or 0 end
  local version = string.match(field, '^%S+ ')
  return version, version and tonumber(version) or -1
end

-- Remove the results of the lowest version, or of the first round that has it, if it comes before these. opened: nil
-- unless they are of a round. Returns whether there is room now.
local function make_room(version, opened)
  if redis.call('HLEN', keys.evals) < MAX_EVALS then return true end
  local lowest, first, fields, flat = nil, {version, opened or 0}, {}, redis.call('HGETALL', keys.evals)
  for i = 1, #flat, 2 do
    local prefix, number, since = rank_of(flat[i], flat[i + 1])
    if prefix and (number < first[1] or (number == first[1] and since and since < first[2])) then
      lowest, first = prefix, {number, since or 0}
    end
  end
  if not lowest then return false end
  for i = 1, #flat, 2 do
    if string.sub(flat[i], 1, #lowest) == lowest then fields[#fields + 1] = flat[i] end
  end
  redis.call('HDEL', keys.evals, unpack(fields))
  if string.sub(lowest, 1, 6) ~= 'round ' then
    redis.call('HSET', keys.evals, 'floor', string.format('%d', first[1]))
  end
  return true
end

-- Add a group that has ended. With the n rewards of a group, their sum s and the best one, a pair has, over its groups:
-- groups with a reward, sum of n, rollouts without a reward, sums of s, s * s, n * s, n * n and best, least and greatest
-- reward. They give mean and standard error, also with groups of different sizes, from all shards together.
local function note_evaluation(group, rewards)
  local oldest, newest = versions_of_group(group)
  local round = round_of(group)
  local version = (round and newest or oldest) or -1
  if not is_kept(group, version, round) then return end
  local prefix = round and 'round ' .. round .. ' ' or oldest and string.format('%d ', oldest) or '- '
  local field = prefix .. group.data_source
  local stored = redis.call('HGET', keys.evals, field)
  if not stored and not make_room(version, round and tonumber(group.opened_ms)) then
    field = prefix .. 'other'
    stored = redis.call('HGET', keys.evals, field)
  end
  local n, sum, low, high = #rewards, 0, rewards[1] or 0, rewards[1] or 0
  for _, reward in ipairs(rewards) do sum, low, high = sum + reward, math.min(low, reward), math.max(high, reward) end
  local sums = {math.min(n, 1), n, math.max(0, group.size - n), sum, sum * sum, n * sum, n * n, high, low, high}
  if round then sums[11], sums[12], sums[13] = oldest or 2 ^ 53, newest or -1, tonumber(group.opened_ms) end
  local before = {}
  for text in string.gmatch(stored or '', '%S+') do before[#before + 1] = tonumber(text) end
  if #before == #sums then
    for i = 1, 8 do sums[i] = sums[i] + before[i] end
    if n == 0 then
      sums[9], sums[10] = before[9], before[10]
    elseif before[1] > 0 then
      sums[9], sums[10] = math.min(low, before[9]), math.max(high, before[10])
    end
    if round then sums[11] = math.min(sums[11], before[11]) end
    for i = 12, #sums do sums[i] = math.max(sums[i], before[i]) end
  end
  for i, number in ipairs(sums) do sums[i] = string.format('%.17g', number) end
  redis.call('HSET', keys.evals, field, table.concat(sums, ' '))
end

-- The reward in the JSON that `producer.score` has written, or nil.
local function reward_in(score)
  local is_json, value = pcall(cjson.decode, score)
  return is_json and type(value) == 'table' and tonumber(value.reward) or nil
end

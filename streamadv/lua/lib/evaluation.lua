-- What evaluation groups have shown, by policy version and data source.
-- KEYS  evals
-- The hash `evals` of a shard:
--   '<version> <data source>'  sums over groups, see `note_evaluation`; version '-' = their members have none
--   'floor'     results of this version and lower ones were removed, and are not taken any more
--   'restored'  '<version> <epoch>': the trainer went back to this version and took this epoch
local MAX_EVALS = 1000  -- pairs kept
local TABLE_HEAD, RECORD, FLAGS_AT, OLDEST_AT, HAS_VERSION = 16, 56, 3, 24, 4  -- of a member table, see member_table.py

-- The oldest version of the member at this position of a packet, or nil.
local function oldest_version(packet, position)
  local at = TABLE_HEAD + RECORD * (position - 1) + 1
  local flags = string.byte(packet.table, at + FLAGS_AT)
  if not flags or flags % (2 * HAS_VERSION) < HAS_VERSION then return nil end
  local version, bytes = 0, {string.byte(packet.table, at + OLDEST_AT, at + OLDEST_AT + 6)}
  for i = #bytes, 1, -1 do version = 256 * version + bytes[i] end
  return version
end

-- The version of a group: the oldest one of the members that count; without such members the one it was begun at.
local function version_of_group(group)
  local oldest, counted = nil, false
  for _, packet in ipairs(group.packets) do
    for position, member in ipairs(packet.members) do
      if member.counts then
        counted = true
        local version = oldest_version(packet, position)
        if version and (not oldest or version < oldest) then oldest = version end
      end
    end
  end
  if not counted then oldest = tonumber(group.version) end
  return oldest
end

-- Whether results of this version are kept: those of weights that the trainer has taken back are not.
local function is_kept(group, version)
  local f = redis.call('HMGET', keys.evals, 'floor', 'restored')
  if version <= (tonumber(f[1] or '') or -2) then return false end
  local restored, epoch = string.match(f[2] or '', '^(%d+) (%d+)$')
  return not restored or version <= tonumber(restored) or tonumber(group.epoch) >= tonumber(epoch)
end

-- Remove the results of the lowest version if there is one below this. Returns whether there is room now.
local function make_room(version)
  if redis.call('HLEN', keys.evals) < MAX_EVALS then return true end
  local fields, lowest = {}, version
  for _, field in ipairs(redis.call('HKEYS', keys.evals)) do
    local number = string.match(field, '^(%S+) ')
    number = number and (tonumber(number) or -1)
    if number and number < lowest then fields, lowest = {}, number end
    if number == lowest then fields[#fields + 1] = field end
  end
  if lowest == version then return false end
  redis.call('HDEL', keys.evals, unpack(fields))
  redis.call('HSET', keys.evals, 'floor', string.format('%d', lowest))
  return true
end

-- Add a group that has ended. With the n rewards of a group, their sum s and the best one, a pair has, over its groups:
-- groups with a reward, sum of n, rollouts without a reward, sums of s, s * s, n * s, n * n and best, least and greatest
-- reward. They give mean and standard error, also with groups of different sizes, from all shards together.
local function note_evaluation(group, rewards)
  local version = version_of_group(group)
  if not is_kept(group, version or -1) then return end
  local prefix = version and string.format('%d ', version) or '- '
  local field = prefix .. group.data_source
  local stored = redis.call('HGET', keys.evals, field)
  if not stored and not make_room(version or -1) then
    field = prefix .. 'other'
    stored = redis.call('HGET', keys.evals, field)
  end
  local n, sum, low, high = #rewards, 0, rewards[1] or 0, rewards[1] or 0
  for _, reward in ipairs(rewards) do sum, low, high = sum + reward, math.min(low, reward), math.max(high, reward) end
  local sums = {math.min(n, 1), n, math.max(0, group.size - n), sum, sum * sum, n * sum, n * n, high, low, high}
  local before = {}
  for text in string.gmatch(stored or '', '%S+') do before[#before + 1] = tonumber(text) end
  if #before == #sums then
    for i = 1, 8 do sums[i] = sums[i] + before[i] end
    if n == 0 then
      sums[9], sums[10] = before[9], before[10]
    elseif before[1] > 0 then
      sums[9], sums[10] = math.min(low, before[9]), math.max(high, before[10])
    end
  end
  for i, number in ipairs(sums) do sums[i] = string.format('%.17g', number) end
  redis.call('HSET', keys.evals, field, table.concat(sums, ' '))
end

-- The reward in the JSON that `producer.score` has written, or nil.
local function reward_in(score)
  local is_json, value = pcall(cjson.decode, score)
  return is_json and type(value) == 'table' and tonumber(value.reward) or nil
end
